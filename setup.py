"""Packaging of atom_patches.

The one unusual part is `atom_patches.pth`, which has to lie beside the package in site-packages, in a wheel
and in an editable install alike. A wheel's data directory has a scheme for exactly that (`NAME.data/purelib`),
and setuptools fills the sibling `NAME.data/data` in both kinds of build.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import Distribution, find_packages, setup  # isort: skip  # provides distutils on Python >= 3.12

from distutils.command.install_data import install_data

ROOT = Path(__file__).parent


class install_data_beside_package(install_data):
    """Install the data files into the wheel's purelib scheme instead of under sys.prefix."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.install_dir = str(Path(self.install_dir).parent / "purelib")


class DistributionWithData(Distribution):
    """An editable build installs its data files if the distribution `has_data()`, which is otherwise undefined."""

    def has_data(self) -> bool:
        return bool(self.has_data_files())


def version() -> str:
    text = (ROOT / "atom_patches" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('atom_patches/__init__.py has no line of the form __version__ = "…"')
    return found.group(1)


def description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="atom-patches",
    version=version(),
    description="ATOM's kernels, models and parallelism for unmodified vLLM and SGLang, as in-memory patches",
    long_description=description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=["wrapt>=1.16", "packaging>=22"],
    packages=find_packages(include=["atom_patches", "atom_patches.*"]),
    py_modules=["atom_patches_boot"],
    extras_require={"plot": ["matplotlib>=3.7"]},
    package_data={
        "atom_patches": [
            "*/fingerprints/*.json",
            "cli/templates/*.txt",
            "kernels/measured/*/*.json",
            "kernels/*/configs/*/*.json",
        ]
    },
    data_files=[("", ["atom_patches.pth"])],
    distclass=DistributionWithData,
    cmdclass={"install_data": install_data_beside_package},  # pyright: ignore[reportArgumentType]
    entry_points={
        "console_scripts": ["atom-patches = atom_patches.__main__:main"],
        "vllm.general_plugins": ["atom = atom_patches_boot:vllm_general_plugin"],
        "vllm.platform_plugins": ["atom = atom_patches_boot:vllm_platform_plugin"],
        "sglang.srt.plugins": ["atom = atom_patches_boot:sglang_plugin"],
    },
    zip_safe=False,
)
