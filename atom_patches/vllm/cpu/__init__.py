"""What unmodified vLLM lacks to run hybrid and MoE models on its CPU platform."""
