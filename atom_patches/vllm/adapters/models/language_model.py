"""An ATOM decoder as vLLM calls a language model: the body that it compiles, and the shell with the head around it."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import PPMissingLayer, make_empty_intermediate_tensors_factory, maybe_prefix
from vllm.sequence import IntermediateTensors

from atom_patches.models import families
from atom_patches.models.decoder import Carried
from atom_patches.models.loading import load_parameter, load_weights
from atom_patches.models.weights import fused_names
from atom_patches.vllm.adapters.models.parts import VllmParts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HEAD = "lm_head."


# Positions are [3, rows] where they stand for time, height and width, else [rows].
@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class AtomBody(nn.Module):
    """From token ids or embeddings to normed hidden states, or to what the next pipeline stage takes."""

    def __init__(self, *, vllm_config: Any, family: str, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.decoder = families.make(family, config, VllmParts(vllm_config, prefix), prefix=prefix)
        self.last = self.decoder.stage.last
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.decoder.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        carried = None
        if intermediate_tensors is not None:
            tensors = intermediate_tensors.tensors
            carried = Carried(tensors["hidden_states"], tensors["residual"])
        output = self.decoder(input_ids, positions, input_embeds=inputs_embeds, carried=carried)
        if self.last:
            return output.hidden
        return IntermediateTensors({"hidden_states": output.hidden, "residual": output.residual})


class AtomForCausalLM(nn.Module, SupportsPP):
    """A decoder with its head."""

    family: ClassVar[str]
    packed_modules_mapping = fused_names(packed=False)
    """vLLM's quantisation looks here for what checkpoints call the parts of a layer."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = AtomBody(vllm_config=vllm_config, family=self.family, prefix=maybe_prefix(prefix, "model"))
        self.tied = bool(config.tie_word_embeddings)
        self.lm_head = self._head(config, vllm_config.quant_config, maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def _head(self, config: Any, quant_config: Any, prefix: str) -> nn.Module:
        if not get_pp_group().is_last_rank:
            return PPMissingLayer()
        if self.tied and get_pp_group().is_first_rank:
            return self.model.decoder.embed_tokens
        return ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=prefix)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **unused: object,
    ) -> Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint's weights; return the parameters that were filled."""
        loaded: set[str] = set()
        body = load_weights(self.model.decoder, self._beside_head(weights, loaded))
        return loaded | {f"model.decoder.{name}" for name in body}

    def _beside_head(self, weights: Iterable[tuple[str, Tensor]], loaded: set[str]) -> Iterable[tuple[str, Tensor]]:
        """Load the head, and hand on what is not the head's alone."""
        has_head = isinstance(self.lm_head, ParallelLMHead)
        for name, tensor in weights:
            own = name.startswith(HEAD)
            if has_head and (own or (self.tied and name.endswith("embed_tokens.weight"))):
                parameter = name.rpartition(".")[2]
                load_parameter(self.lm_head.get_parameter(parameter), tensor)
                loaded.add(f"{HEAD}{parameter}")
            if not own:
                yield name, tensor
