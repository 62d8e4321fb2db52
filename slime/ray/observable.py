"""Ray actors that can be asked while they work."""

from __future__ import annotations

_GROUP = "observe"


def observable(actor_class: type, methods: tuple[str, ...]):
    """``actor_class`` as a Ray actor whose ``methods`` answer from a thread of their own while another method runs."""
    import ray

    in_own_thread = ray.method(concurrency_group=_GROUP)
    answering = {name: in_own_thread(getattr(actor_class, name)) for name in methods}
    marked = type(actor_class.__name__, (actor_class,), answering | {"__module__": actor_class.__module__})
    return ray.remote(concurrency_groups={_GROUP: 1})(marked)
