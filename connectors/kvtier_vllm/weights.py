"""Notices that the weights of a running engine were changed in place.

KV of the old weights is garbage under the new ones and the other way round, so from the first sign
of a change on the worker neither loads nor saves anything, until somebody names the new weights::

    llm.collective_rpc("kvtier_set_revision", args=("step-100",))

(over HTTP with VLLM_SERVER_DEV_MODE=1: ``POST /collective_rpc`` with
``{"method": "kvtier_set_revision", "args": ["step-100"]}``). The name becomes part of every key, so the
same name must never stand for other weights.

vLLM tells a connector nothing about its weights, so these are the signs:

- the worker's own ways to change them (`reload_weights`, the weight transfer calls, sleep level 2);
- `load_weights` of the model object, which trainers call through a worker extension;
- the version counters and addresses of the parameters, compared on each step that moves KV.

Writes through ``parameter.data`` outside all of these cannot be seen: call `kvtier_set_revision` after
them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from kvtier_vllm.metadata import WeightsState

logger = logging.getLogger("vllm.kvtier")

_CHANGING: Final = (
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
_watches: weakref.WeakSet[WeightsWatch] = weakref.WeakSet()
_last_worker: weakref.ref[Any] | None = None


class WeightsWatch:
    """What one worker knows about its weights. Thread-safe.

    Parameters
    ----------
    on_change
        Called from the thread that changes the weights, before it changes them.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._state = WeightsState()
        self._model: weakref.ref[Any] | None = None
        self._stamp: int | None = None
        _watches.add(self)
        worker = _last_worker() if _last_worker is not None else None
        if worker is not None:
            self.attach(worker)

    @property
    def state(self) -> WeightsState:
        """The current version."""
        return self._state

    def attach(self, worker: Any) -> None:
        """Watch the model of `worker`; a second call does nothing."""
        if self._model is not None:
            return
        try:
            model = worker.get_model()
            self._model = weakref.ref(model)
        except (AttributeError, NotImplementedError, TypeError):
            return
        self.settle()
        load_weights = getattr(model, "load_weights", None)
        if load_weights is not None:
            model.load_weights = self._announcing(load_weights)

    def _announcing(self, load_weights: Callable[..., Any]) -> Callable[..., Any]:
        watch = weakref.ref(self)

        @functools.wraps(load_weights)
        def announced(*args: Any, **kwargs: Any) -> Any:
            mine = watch()
            if mine is not None:
                mine.changed("load_weights was called on the model")
            return load_weights(*args, **kwargs)

        return announced

    def settle(self) -> None:
        """Take the parameters as they are now for the weights of the current version."""
        self._stamp = self._read_stamp()

    def check(self) -> WeightsState:
        """The current version, after a look at the parameters."""
        if self._stamp is None:
            self.settle()
        elif not self._state.changed and self._read_stamp() != self._stamp:
            self.changed("parameters of the model were written")
        return self._state

    def changed(self, why: str) -> None:
        """The weights are about to change, or have: everything stops until `revise`."""
        with self._lock:
            first = not self._state.changed
            self._state = WeightsState(self._state.epoch + 1, True, self._state.revision, why)
        if first:
            logger.warning(
                "kvtier: %s. Nothing is loaded or saved from now on; name the new weights with "
                "collective_rpc('kvtier_set_revision', args=('...',)) to go on",
                why,
            )
        self._on_change()

    def revise(self, revision: str) -> None:
        """The weights that are here now are called `revision`."""
        if not isinstance(revision, str) or not 0 < len(revision) <= 256:
            raise ValueError("kvtier_set_revision takes the name of the weights: 1 to 256 characters")
        with self._lock:
            self._state = WeightsState(self._state.epoch + 1, False, revision)
        self._on_change()
        self.settle()
        logger.info("kvtier: the weights have a new revision; loading and saving go on under it")

    def _read_stamp(self) -> int | None:
        model = self._model() if self._model is not None else None
        if model is None:
            return None
        stamp = 0
        for parameter in model.parameters():
            # Tensors made in inference mode have no version.
            with contextlib.suppress(RuntimeError):
                stamp = hash((stamp, parameter.data_ptr(), parameter._version))
        return stamp


def _tell(why: str) -> None:
    for watch in list(_watches):
        watch.changed(why)


def _set_revision(self: Any, revision: str) -> int:
    """A method of vLLM's workers, for `collective_rpc`; returns how many connectors heard it."""
    heard = list(_watches)
    for watch in heard:
        watch.revise(revision)
    return len(heard)


def install_hooks() -> None:
    """Let every vLLM worker of this process tell its watch about its weights; idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    if hasattr(WorkerBase, "kvtier_set_revision"):
        return
    WorkerBase.kvtier_set_revision = _set_revision
    WorkerWrapperBase.initialize_from_config = _remembering(WorkerWrapperBase.initialize_from_config)
    WorkerWrapperBase.execute_model = _attaching(WorkerWrapperBase.execute_model)


def _remembering(initialize_from_config: Callable[..., Any]) -> Callable[..., Any]:
    """The connector is made inside this call: its worker is known before."""

    @functools.wraps(initialize_from_config)
    def remembered(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _last_worker
        _last_worker = weakref.ref(self.worker)
        _announce_changes(type(self.worker))
        return initialize_from_config(self, *args, **kwargs)

    return remembered


def _attaching(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    """Where the hooks came too late for `_remembering` (no plug-in), the first step attaches."""

    @functools.wraps(execute_model)
    def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
        for watch in _watches:
            if watch._model is None:
                _announce_changes(type(self.worker))
                watch.attach(self.worker)
        return execute_model(self, *args, **kwargs)

    return attached


def _announce_changes(worker_class: type) -> None:
    """Wrap what changes weights in `worker_class`, once."""
    if worker_class.__dict__.get("_kvtier_announces"):
        return
    for name in _CHANGING:
        method = getattr(worker_class, name, None)
        if method is not None:
            setattr(worker_class, name, _announced(method, f"{name} was called"))
    sleep = getattr(worker_class, "sleep", None)
    if sleep is not None:
        worker_class.sleep = _announced_sleep(sleep)  # type: ignore[attr-defined]
    worker_class._kvtier_announces = True  # type: ignore[attr-defined]


def _announced(method: Callable[..., Any], why: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tell(why)
        return method(self, *args, **kwargs)

    return announced


def _announced_sleep(sleep: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def announced(self: Any, level: int = 1) -> Any:
        for watch in list(_watches):
            # Sleeping takes the KV memory away: no copy may still run.
            watch._on_change()
            if level >= 2:
                watch.changed("sleep level 2 discarded the weights")
        return sleep(self, level)

    return announced
