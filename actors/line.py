"""How replicas and ingresses reach the controller, of which they need to know no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from gammaray.actors.crew import NAMESPACE
from gammaray.routing.bulletin import Answer, Bulletin, Known, Origin
from gammaray.routing.window import Window

NAME = "controller"
ANSWER_S = 3.0


class RayDesk:
    """What a replica or an ingress asks of the controller, from one thread."""

    def __init__(self) -> None:
        self._actor: Any = None

    def tell(self, origin: Origin, windows: tuple[Window, ...]) -> Answer:
        """Raises whatever Ray does."""
        answer: Answer = self._ask(lambda actor: actor.tell, origin, windows)
        return answer

    def bulletin(self, known: Known) -> Bulletin | None:
        """Raises whatever Ray does."""
        answer: Bulletin | None = self._ask(lambda actor: actor.bulletin, known)
        return answer

    def _ask(self, method: Callable[[Any], Any], *arguments: object) -> Any:
        """Once: what is asked again and again needs no retry of Ray's."""
        try:
            self._actor = self._actor or ray.get_actor(NAME, NAMESPACE)
            call = method(self._actor).options(max_task_retries=0).remote(*arguments)
            return ray.get(call, timeout=ANSWER_S)
        except Exception:
            self._actor = None  # there may be another one next time
            raise
