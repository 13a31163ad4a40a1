"""Counting XLA compilations, to see that a warmed-up loop makes none."""

import weakref

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts the programs that XLA compiles in this process from now on.

    Attributes:
      value: compilations so far, of whatever function.
    """

    def __init__(self):
        self.value = 0
        counter = weakref.ref(self)

        # holds no strong reference, so that a counter that is dropped stops listening
        def listen(event: str, duration_secs: float, **kwargs) -> None:
            alive = counter()
            if alive is not None and event == _EVENT:
                alive.value += 1

        jax.monitoring.register_event_duration_secs_listener(listen)
        self.stop = weakref.finalize(
            self, jax.monitoring.unregister_event_duration_listener, listen
        )
