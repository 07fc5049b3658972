"""Which model families the patch serves, by transformers' `model_type`, and why others aren't."""

# Compared with stock in the tests: logits in fp32, greedy, beams, padded batches.
SERVED = {
    "deepseek_v2": "DeepSeek-V2, V2-Lite, V2.5",
    "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2, Moonlight",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "youtu": "Youtu-LLM",
}
