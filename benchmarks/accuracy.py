"""How far bfloat16 logits are from float32 ones, stock and paged, along the same forced tokens.

    B rows, n new tokens, V vocabulary; the history is ragged and left-padded

The measure is |logits - logits32| / |logits32| of each row and step, where logits32 come from transformers' own code
in float32 on the very same weights. A paged step is right if its error is that of bfloat16 itself.
"""

import copy

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

BATCH = 4
NEW_TOKENS = 9


class ForcedTokens(LogitsProcessor):
    """Makes generation take given tokens, [B, n], so that runs stay comparable after a near tie."""

    def __init__(self, tokens: torch.Tensor, prompt_columns: int):
        self.tokens, self.prompt_columns = tokens, prompt_columns

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        wanted = self.tokens[:, input_ids.shape[1] - self.prompt_columns, None]
        return torch.full_like(scores, -torch.inf).scatter(1, wanted, 0.0)


def forced_logits(model: PreTrainedModel, columns: int, cache_implementation: str | None) -> torch.Tensor:
    """Logits [n, B, V] in float32 of n forced tokens after a ragged prompt of at most `columns` tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (BATCH, columns + NEW_TOKENS), generator=generator)
    ids = ids.to(model.device)
    pads = torch.arange(BATCH, device=model.device)[:, None] * (columns // (2 * BATCH))
    mask = (torch.arange(columns, device=model.device) >= pads).long()
    output = model.generate(
        ids[:, :columns],
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        cache_implementation=cache_implementation,
        logits_processor=LogitsProcessorList([ForcedTokens(ids[:, columns:], columns)]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(output.logits).float()


def relative_errors(logits: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Of logits [n, B, V]: the worst row of the prefill's step, and the median and the worst of the decode steps."""
    errors = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    decode = errors[1:].flatten()
    return {
        "prefill_max": errors[0].max().item(),
        "decode_median": decode.median().item(),
        "decode_max": decode.max().item(),
        "same_argmax": (logits.argmax(-1) == exact.argmax(-1)).float().mean().item(),
    }


def compare(model: PreTrainedModel, columns: int, backend: str, paged: bool) -> dict[str, dict[str, float]]:
    """Errors against float32 of stock bfloat16 and, with `paged`, of paged bfloat16 and paged float32.

    Args:
        model: A bfloat16 model, small enough for a float32 copy beside it. It is patched afterwards.
        columns: Prompt length.
        backend: Backend given to `hf_mla.patch`.
        paged: Whether to measure the paged cache.
    """
    exact_model = copy.deepcopy(model).float()
    exact_model.set_experts_implementation("eager")
    exact = forced_logits(exact_model, columns, None)
    errors = {"stock bfloat16": relative_errors(forced_logits(model, columns, None), exact)}
    if paged:
        import hf_mla

        hf_mla.patch(model, backend=backend)
        errors["paged bfloat16"] = relative_errors(forced_logits(model, columns, "paged_mla"), exact)
        # FlashInfer has no float32 kernels.
        hf_mla.patch(exact_model, backend="auto" if backend == "flashinfer" else backend)
        errors["paged float32"] = relative_errors(forced_logits(exact_model, columns, "paged_mla"), exact)
    return errors
