# SPDX-License-Identifier: Apache-2.0
"""Optimizers over the parameters of a module, schedules of their learning rates, and gradients that are too large."""
from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, List, Optional, Sequence, Tuple, Union

from ._arguments import Unique
from ._library import constants, lib, struct
from .nn._module import Module, _named_list
from .tensor import _calls
from .tensor._calls import AnyGroup
from .tensor._tensor import Tensor

_Sgd, _AdamW, _Group, _Schedule = struct("tt_sgd"), struct("tt_adamw"), struct("tt_parameter_group"), struct("tt_schedule")
_sgd, _adamw = _calls.bind("tt_sgd_optimizer", "pointer", "PP"), _calls.bind("tt_adamw_optimizer", "pointer", "PP")
_add_group = _calls.bind("tt_optimizer_add_group", "int", "PLP")
_add_group.restype = ctypes.c_int
_step, _zero_grad = _calls.bind("tt_optimizer_step", "done", "P"), _calls.bind("tt_optimizer_zero_grad", "done", "P")
_steps = _calls.bind("tt_optimizer_steps", "tensor", "P")
_rate = _calls.bind("tt_optimizer_learning_rate", "tensor", "Pi")
_state = _named_list("tt_optimizer_state")
_factor, _apply = _calls.bind("tt_schedule_factor", "double", "Pq"), _calls.bind("tt_schedule_apply", "done", "PP")
_clip_norm, _clip_value = _calls.bind("tt_clip_grad_norm_by", "tensor", "LdGP"), _calls.bind("tt_clip_grad_value", "done", "Ld")
_clip_module, _ClipOptions = _calls.bind("tt_module_clip_grad_norm_by", "tensor", "PdGP"), struct("tt_clip_options")
_ZERO = -0.0  # in the library's options 0 is the default, and this is the number


def _given(value: Optional[float]) -> float:
    return 0.0 if value is None else _ZERO if value == 0 else value


class Optimizer(Unique):
    """Trains the parameters that a module has now and that require grad."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._release = weakref.finalize(self, _release, os.getpid(), handle)
        self._release.atexit = False

    def step(self) -> None:
        """One step with the gradients that are there. Parameters without one are left as they are."""
        _calls.done(_step, self._handle)

    def zero_grad(self) -> None:
        """Removes the gradients of all its parameters."""
        _calls.done(_zero_grad, self._handle)

    @property
    def steps(self) -> int:
        """How many were made."""
        return int(_calls.tensor(_steps, self._handle).item())

    @property
    def learning_rate(self) -> float:
        """Of the first group; what is set counts from the next step on."""
        return self.learning_rate_of(0).item()

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.learning_rate_of(0).fill_(rate)

    def learning_rate_of(self, group: int) -> Tensor:
        """The learning rate of a group, a tensor of one f64: the optimizer's own."""
        return _calls.tensor(_rate, self._handle, group)

    def add_group(self, parameters: Sequence[Tensor], learning_rate: Optional[float] = None, weight_decay: Optional[float] = None) -> int:
        """Moves these parameters to a new group with a rate or decay of its own, and returns its number."""
        options = _Group(learning_rate=learning_rate or 0.0, weight_decay=_given(weight_decay))
        return _calls.answer(_add_group, self._handle, parameters, ctypes.byref(options))

    def state(self) -> List[Tuple[str, Tensor]]:
        """Everything that it remembers: its own tensors, so that writing them changes it."""
        return _calls.named(_state, self._handle)


def _release(process: int, handle: int) -> None:
    if process == os.getpid():
        lib.tt_optimizer_release(handle)


class SGD(Optimizer):
    """Stochastic gradient descent."""

    def __init__(self, module: Module, learning_rate: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        options = _Sgd(learning_rate=_given(learning_rate), momentum=_given(momentum), weight_decay=_given(weight_decay))
        super().__init__(_calls.answer(_sgd, module._need(), ctypes.byref(options)))


class AdamW(Optimizer):
    """AdamW with bias correction and decoupled decay."""

    def __init__(self, module: Module, learning_rate: float = 0.001, betas: Tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8,
                 weight_decay: float = 0.01) -> None:
        options = _AdamW(learning_rate=_given(learning_rate), beta1=_given(betas[0]), beta2=_given(betas[1]), epsilon=_given(epsilon),
                         weight_decay=_given(weight_decay))
        super().__init__(_calls.answer(_adamw, module._need(), ctypes.byref(options)))


class Schedule:
    """A learning rate as a function of the number of steps: kind is "constant", "linear", "step" or "cosine", each after a warm-up. It has no state."""

    def __init__(self, kind: str = "constant", warm_up: int = 0, steps: int = 0, every: int = 0, factor: float = 0.0, last: float = 0.0) -> None:
        number = constants.get(f"TT_SCHEDULE_{kind.upper()}")
        if number is None:
            raise ValueError(f"tutti: {kind!r} is no schedule; there are constant, linear, step and cosine")
        self._schedule = _Schedule(kind=number, warm_up=warm_up, steps=steps, every=every, factor=factor, last=last)

    def factor(self, done: int) -> float:
        """By what the rate is multiplied in the step that follows `done` steps."""
        return _calls.answer(_factor, ctypes.byref(self._schedule), done)

    def apply(self, optimizer: Optimizer) -> None:
        """Sets the rate of every group for the next step."""
        _calls.done(_apply, ctypes.byref(self._schedule), optimizer._handle)


def clip_grad_norm(parameters: Union[Module, Sequence[Tensor]], limit: float, group: Optional[AnyGroup] = None, p: float = 2.0, finite: bool = False) -> Tensor:
    """The p-norm of all gradients together (inf: the largest absolute value); where it is above `limit`, all are scaled in place so that it is `limit`. With a group,
    parameters are spread over its ranks, and the norm is over all of them. A module instead of parameters may have tensor parallel layers, whose parts count as what
    they are, and group is that over which it is fully sharded. finite: a norm that is not is an error, and gradients stay."""
    options = ctypes.byref(_ClipOptions(p=p, finite=bool(finite)))
    if isinstance(parameters, Module):
        return _calls.tensor(_clip_module, parameters._need(), limit, group, options)
    return _calls.tensor(_clip_norm, parameters, limit, group, options)


def clip_grad_value(parameters: Sequence[Tensor], limit: float) -> None:
    """Brings every element of every gradient into [-limit, limit]."""
    _calls.done(_clip_value, parameters, limit)
