"""The port that Serve opens in the process of every replica, for calls of other replicas by gRPC."""

from __future__ import annotations

from typing import Any

import ray
from ray._common.network_utils import build_address
from ray.serve._private import replica


def listen_at_node() -> None:
    """Makes Serve open the port of this process's replica at the address of its node, which other replicas call: for
    `__init__`, after which Serve opens it.

    Serve would open it at all addresses of the machine, also on a cluster that is on 127.0.0.1, and it unpickles what
    it receives. Whoever reaches it can run code, unless Ray asks for a token. No public argument names the address.
    """
    add_port, own = replica.add_port_to_grpc_server, build_address(ray.util.get_node_ip_address(), 0)

    def at_node(server: Any, address: str) -> int:
        return add_port(server, own)

    replica.add_port_to_grpc_server = at_node
