"""Which units an order is for."""

from __future__ import annotations

from collections.abc import Iterator

from gammaray.errors import InvalidRequest, NotFound
from gammaray.routing.book import Book
from gammaray.routing.orders import Order
from gammaray.routing.settings import classes
from gammaray.routing.states import Level


def targets(book: Book, order: Order, now: float) -> Iterator[tuple[Level, int]]:
    """Their levels and places; those that nobody has seen are made.

    Raises NotFound for a tenant, class or drafter that there is not, InvalidRequest for an order that needs
    a drafter and names none.
    """
    tenant, name, drafter = order.tenant, order.request_class, order.drafter
    if tenant is None or tenant not in book.tenants:
        raise NotFound(f"no tenant is named {tenant!r}", param="tenant", code="tenant_not_found")
    names = classes(book.tenants[tenant])
    if name is not None and name not in names:
        raise NotFound(f"tenant {tenant!r} has no class {name!r}", param="class", code="class_not_found")
    if drafter is not None and drafter not in {key[2] for key in book.possible(tenant)}:
        message = f"tenant {tenant!r} has no drafter {drafter!r}"
        raise NotFound(message, param="drafter", code="drafter_not_found")
    if drafter is not None:
        for each in names if name is None else [name]:
            yield "key", book.add_key((tenant, each, drafter), now)
    elif order.action in ("accept", "reject", "violation"):
        raise InvalidRequest(f"{order.action} is for a drafter: name one", param="drafter")
    elif name is not None:
        yield "class", book.add_class((tenant, name), now)
    else:
        yield "tenant", book.add_tenant(tenant, now)
