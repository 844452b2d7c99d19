"""AdamW as torch has it, without torch's compiler.

torch wraps the methods of its optimisers so that the compiler leaves them alone, and each wrapping loads the compiler
first: two seconds on a fast computer, four on a slow one, in every run that compiles nothing. Nothing here compiles an
optimiser, so the methods inside the wrappings are called.
"""

from __future__ import annotations

from inspect import unwrap

import torch


class AdamW(torch.optim.AdamW):
    """Its updates are torch's, to the bit (`tests/machine/test_adamw.py`)."""

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
