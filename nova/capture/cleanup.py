"""Small repairs of a recorded graph: dead nodes, list round trips."""

from __future__ import annotations

import torch
from torch import fx

from nova.capture import keep as _keep  # noqa: F401  (registers nova.demand)
from nova.capture.views import aten


def join_lists(graph: fx.Graph) -> None:
    """stack([x[0], x[1], ..., x[n-1]]) is x."""
    for node in list(graph.nodes):
        if node.target is not aten.stack.default or (len(node.args) > 1 and node.args[1] != 0):
            continue
        pieces = node.args[0]
        whole = pieces[0].args[0] if pieces[0].target is aten.select.int else None
        if whole is None or whole.meta["type"] != node.meta["type"]:
            continue
        if all(p.target is aten.select.int and p.args == (whole, 0, i) for i, p in enumerate(pieces)):
            node.replace_all_uses_with(whole)


RAISING = {
    aten._linalg_check_errors.default, aten._assert_async.default, aten._assert_async.msg,
    torch.ops.nova.demand.default,
}  # fmt: skip


def drop_dead(graph: fx.Graph) -> None:
    """Erases every operation that no output needs: all are free of side effects, but for those that exist to raise."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target not in RAISING:
            graph.erase_node(node)
