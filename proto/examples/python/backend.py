"""A backend that prints every change, and says where connections go. docs/contract.md has the rules.

    python3 -m grpc_tools.protoc -I proto/proto --python_out=OUT --grpc_python_out=OUT proto/proto/localv1/localv1.proto
    PYTHONPATH=OUT KUBE_PROXY_EBPF_TARGET=unix:///run/kube-proxy-ebpf/proxy.sock NODE_NAME=worker-1 python3 backend.py

It answers questions on standard input, such as `lookup 10.1.0.7 10.96.0.1 80 TCP`, and prints changes on standard error.
"""

import ipaddress
import os
import queue
import sys
import threading
import time

import grpc
from localv1 import localv1_pb2 as pb
from localv1 import localv1_pb2_grpc as rpc

TARGET = os.environ["KUBE_PROXY_EBPF_TARGET"]
TARGET = "unix:" + TARGET.removeprefix("unix://") if TARGET.startswith("unix://") else TARGET.removeprefix("tcp://")
CIDRS = [ipaddress.ip_network(it) for it in os.environ.get("KUBE_PROXY_EBPF_CLUSTER_CIDRS", "").split(",") if it]
OWN = os.environ.get("KUBE_PROXY_EBPF_NODE_ADDRESSES", "").split(",")
TYPES = {pb.ServicesSet: pb.Service, pb.EndpointsSet: pb.Endpoint}

# The last complete state: for each set, messages by path. Replaced as a whole at a sync.
state = {it: {} for it in TYPES}


def follow():
    """Follows one stream until it ends; raises grpc.RpcError."""
    global state
    requests = queue.Queue()
    request = pb.WatchReq(node_name=os.environ["NODE_NAME"])
    requests.put(request)
    received = {it: dict(objects) for it, objects in state.items()}
    # By default, the authority of a Unix socket is its path, which is not valid in HTTP/2.
    with grpc.insecure_channel(TARGET, [("grpc.default_authority", "localhost")]) as channel:
        # None ends the requests.
        for item in rpc.SetsStub(channel).Watch(iter(requests.get, None)):
            op = item.WhichOneof("op")
            if op == "reset":
                # What is not sent again is gone at the next sync; until then the last state stays.
                received = {it: {} for it in TYPES}
            elif op == "set" and item.set.ref.set in TYPES:
                message = TYPES[item.set.ref.set].FromString(item.set.bytes)
                received[item.set.ref.set][item.set.ref.path] = message
            elif op == "delete" and item.delete.set in TYPES:
                received[item.delete.set].pop(item.delete.path, None)
            elif op == "sync":
                report(state, received)
                state = {it: dict(objects) for it, objects in received.items()}
                requests.put(request)


def report(before, after):
    for kind in TYPES:
        for path in sorted(before[kind].keys() | after[kind].keys()):
            old, new = before[kind].get(path), after[kind].get(path)
            if old != new:
                sign = "+" if old is None else "-" if new is None else "~"
                print(sign, path, file=sys.stderr, flush=True)


def entry(endpoint, service, index):
    """The port of an endpoint and its scopes for a port of its Service; None if it does not serve that port."""
    port, entries = service.ports[index], endpoint.port_overrides
    name = port.name or port.target_port_name
    if any(it.HasField("index") for it in entries):
        found = [it for it in entries if it.HasField("index") and it.index == index]
    else:
        found = [it for it in entries if it.name == name]
        if not found and not name:
            return port.target_port or port.port, endpoint.scopes
    return next(((it.port, it.scopes if it.HasField("scopes") else endpoint.scopes) for it in found), None)


def lookup(source, destination, number, protocol):
    services, endpoints = state[pb.ServicesSet], state[pb.EndpointsSet]
    family = "v4" if ipaddress.ip_address(destination).version == 4 else "v6"
    inside = any(ipaddress.ip_address(source) in it for it in CIDRS)
    for path, service in services.items():
        clusters = getattr(service.ips.cluster_ips, family)
        outside = [*getattr(service.ips.external_ips, family), *getattr(service.ips.load_balancer_ips, family)]
        for index, port in enumerate(service.ports):
            if port.protocol != pb.Protocol.Value(protocol):
                continue
            is_cluster_ip = port.port == number and destination in clusters
            is_own = is_cluster_ip or port.port == number and destination in outside
            if not is_own and not (clusters and destination in OWN and port.node_port == number):
                continue
            filters = [it for it in service.ip_filters if is_own and destination in getattr(it.target_ips, family)]
            ranges = [ipaddress.ip_network(cidr) for it in filters for cidr in it.source_ranges]
            if filters and not is_cluster_ip and not any(ipaddress.ip_address(source) in it for it in ranges):
                return "drop"
            targets = []
            for key, endpoint in endpoints.items():
                found = key.startswith(path + "/") and entry(endpoint, service, index)
                if not found:
                    continue
                scopes = found[1]
                if not scopes.HasField("cluster"):
                    scopes.cluster = scopes.internal or scopes.external
                if scopes.internal if is_cluster_ip else scopes.cluster if inside else scopes.external:
                    brackets = "{}:{}" if family == "v4" else "[{}]:{}"
                    targets += [brackets.format(it, found[0]) for it in getattr(endpoint.ips, family)]
            return " ".join(sorted(targets)) or ("drop" if getattr(port.has_any_endpoint, family) else "refuse")
    return ""


def answer():
    for line in sys.stdin:
        _, source, destination, number, protocol = line.split()
        print(lookup(source, destination, int(number), protocol), flush=True)
    os._exit(0)


threading.Thread(target=answer, daemon=True).start()
delay = 0.05
while True:
    try:
        follow()
        delay = 0.05
    except grpc.RpcError as error:
        print(f"{TARGET}: {error.code().name} {error.details()}; the last state stays; reconnecting in {delay} s", file=sys.stderr, flush=True)
    time.sleep(delay)
    delay = min(2 * delay, 5)
