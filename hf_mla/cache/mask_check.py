"""Whether a decode step's mask says what the cache remembers, found out on the device.

    B rows, K columns of which some are masked, L columns of the mask

A mask lies on the device, behind all the work queued before it: to read it, the host would wait for the step before,
and the device then for the host. In nearly every step the mask is the one before with ones appended. So the step is
planned as if it were, this check is queued ahead of it, and its answer is read once the step's own work is queued too.
"""

import torch


class MaskCheck:
    """Compares `mask` with what the cache stored.

    Args:
        mask: [B, L], 0 for masked columns.
        kept: [B, K] bool on the mask's device, what is stored of the first K <= L columns, the rest being stored in
            every row; None where everything is.
    """

    def __init__(self, mask: torch.Tensor, kept: torch.Tensor | None):
        first = 0 if kept is None else kept.shape[1]
        as_stored = mask[:, first:].all()
        if kept is not None:
            as_stored = as_stored & (mask[:, :first].bool() == kept).all()
        on_gpu = mask.device.type == "cuda"
        self._answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=on_gpu)
        self._answer.copy_(as_stored, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(mask.device))

    def holds(self) -> bool:
        """Whether the mask is as stored; waits for the device to have come so far."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._answer)
