"""Which model families the patch serves, by the `model_type` of the decoder's config, and why others aren't.

Everything here is compared with stock by the tests: logits in fp32, greedy, beams, padded batches, reused prefixes.
"""

from dataclasses import dataclass
from typing import Literal

# How a decode step reads the pages:
#   absorbed  attention over the pages, with absorbed weights; lengths stand in for the mask
#   sparse    the same over the tokens that the model's own indexer picks, gathered from the pages
#   dense     the history is gathered, and transformers' own attention runs on it
Way = Literal["absorbed", "sparse", "dense"]


@dataclass(frozen=True)
class Family:
    """A served family.

    Args:
        models: Names that people know it by.
        way: How a decode step reads the pages.
        others: What sits between the latent layers and keeps transformers' own cache layers, or "".
        note: What is particular about its latent attention, or "".
    """

    models: str
    way: Way = "absorbed"
    others: str = ""
    note: str = ""

    @property
    def graphs(self) -> bool:
        """Whether decode steps may be captured: the whole cache must lie in pages, and lengths must say the mask."""
        return self.way == "absorbed" and not self.others

    @property
    def may_be_cut(self) -> bool:
        """Whether a prompt may be run in several passes unasked: what one of them did can be taken back."""
        return not self.others


SERVED: dict[str, Family] = {
    "deepseek_v2": Family("DeepSeek-V2, V2-Lite, V2.5"),
    "deepseek_v3": Family("DeepSeek-V3, R1, Kimi-K2, Kimi-K2.5, Moonlight"),
    "glm4_moe_lite": Family("GLM-4.7-Flash"),
    "youtu": Family("Youtu-LLM"),
    "axk1": Family("A.X K1"),
    "minicpm3": Family("MiniCPM3"),
    "mistral4": Family("Mistral Small 4", note="queries scaled by position"),
    "longcat_flash": Family("LongCat-Flash", note="two attentions a layer, scaled latents"),
    "kimi_linear": Family("Kimi-Linear", others="linear attention", note="no rotary embedding"),
    "bailing_hybrid": Family("Ling 3", others="linear attention", note="gate on each head"),
    "deepseek_v32": Family("DeepSeek-V3.2", "sparse"),
    "glm_moe_dsa": Family("GLM-5", "sparse", note="layers may share one selection"),
    "axk2": Family("A.X K2", "sparse", note="gated output"),
    "hy_v4": Family("Hy4-preview", "sparse", note="attention sinks, gated output"),
    "hy_v4_vl_text": Family("Hy4", "sparse", note="attention sinks, gated output"),
    "mistral_large4_text": Family("Mistral Large 4", "sparse", note="layers may share latents; some without rope"),
    "dots3_note_text": Family("Dots 3 Note", "sparse", others="sliding windows", note="gate on each head"),
    "glm5_next_text": Family(
        "GLM-5.3-Flash", "dense", others="linear attention", note="the mask is built from pooled selections"
    ),
}

# Families with latent attention that `patch` refuses, and why.
REFUSED: dict[str, str] = {}
