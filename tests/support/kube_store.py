"""What a fake Kubernetes cluster holds, and what it answers to one request: `fake_kube` puts it behind HTTP.

It stores objects, checks them against the schemas of `manifests`, and knows a few fields that nobody may
change. It is no Kubernetes: there is no scheduler, no controller, no operator and no kubelet, so nothing ever
runs. What a pod became is what the test says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from support import kube_patch, manifests

Object = dict[str, Any]
Key = tuple[str, str, str]  # plural, namespace ("" where there is none), name
KINDS = {
    "v1": "ConfigMap Namespace PersistentVolumeClaim Pod Secret Service ServiceAccount",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "Ingress NetworkPolicy",
    "resource.k8s.io/v1": "ResourceClaimTemplate",
    "ray.io/v1": "RayService",
    "resource.nvidia.com/v1beta1": "ComputeDomain",
    "monitoring.coreos.com/v1": "PodMonitor PrometheusRule ServiceMonitor",
    "gateway.networking.k8s.io/v1": "HTTPRoute",
}
FIXED = {"ComputeDomain", "PersistentVolumeClaim", "ResourceClaimTemplate"}  # nobody may change their spec
ADDED = {"uid", "resourceVersion", "creationTimestamp", "managedFields"}  # to the metadata, by a server
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/log)?"
)


class Refused(Exception):
    """What a server answers instead of the object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        self.status |= {"reason": reason, "message": message}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    content: str = ""
    body: bytes = b""


@dataclass
class FakeKube:
    """One cluster. `served` has kinds by plural by version; `phase` is what pods are said to have become."""

    served: dict[str, dict[str, str]]
    phase: str = "Succeeded"
    objects: dict[Key, Object] = field(default_factory=dict)
    changes: int = 0

    def answer(self, request: Request) -> Object:
        """Raises Refused."""
        known = self._discovery(request.path)
        if known is not None:
            return known
        found = PATH.fullmatch(request.path)
        version = "/".join(filter(None, (found["group"], found["version"]))) if found else ""
        if found is None or found["plural"] not in self.served.get(version, {}):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        what = {"apiVersion": version, "kind": self.served[version][found["plural"]]}
        key = (found["plural"], found["namespace"] or "", found["name"] or "")
        if request.method == "GET":
            return self._one(key) if key[2] else self._all(key, what, request.query)
        if request.method == "DELETE":
            return self._one(key) and self.objects.pop(key)
        return self._write(key, what, request)

    def _discovery(self, path: str) -> Object | None:
        if path == "/version":
            return {"gitVersion": f"v{manifests.KUBERNETES}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [_group(version) for version in self.served if "/" in version]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = re.sub("^/apis?/", "", path)
        if version not in self.served:
            return None
        resources = [_resource(name, kind) for name, kind in self.served[version].items()]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}

    def _one(self, key: Key) -> Object:
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def _all(self, key: Key, what: Object, query: dict[str, str]) -> Object:
        places = [place for place in self.objects if place[0] == key[0] and key[1] in ("", place[1])]
        items = [self.objects[place] for place in places if _selected(self.objects[place], query)]
        about = {"resourceVersion": str(self.changes)}
        return what | {"kind": f"{what['kind']}List", "metadata": about, "items": items}

    def _write(self, key: Key, what: Object, request: Request) -> Object:
        sent = kube_patch.decoded(request.content, request.body)
        name, namespace, own = key[0], key[1], key[2] or sent["metadata"]["name"]
        held = self.objects.get((name, namespace, own))
        if namespace and ("namespaces", "", namespace) not in self.objects:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if request.method == "POST" and held is not None:
            raise Refused(409, "AlreadyExists", f'{name} "{own}" already exists')
        if held is None and (request.method == "PUT" or "merge-patch" in request.content):
            raise Refused(404, "NotFound", f'{name} "{own}" not found')
        wanted = what | kube_patch.patched(held or {}, sent, request.content)
        _check(wanted, held)
        self.changes += 1
        about = {"name": own, "uid": f"{name}-{own}", "resourceVersion": str(self.changes)}
        about |= {"namespace": namespace} if namespace else {}
        wanted["metadata"] |= about | {"creationTimestamp": "2026-01-01T00:00:00Z"}
        if wanted["kind"] == "Pod":
            wanted["status"] = {"phase": self.phase}
        self.objects[name, namespace, own] = wanted
        return wanted


def plural(kind: str) -> str:
    """As in the paths of the API."""
    name = kind.lower()
    return name[:-1] + "ies" if name.endswith("y") else name + ("es" if name.endswith("s") else "s")


def _check(wanted: Object, held: Object | None) -> None:
    about = {name: value for name, value in wanted["metadata"].items() if name not in ADDED}
    bare = {name: value for name, value in wanted.items() if name != "status"} | {"metadata": about}
    wrong = manifests.problems(bare)
    if held is not None and wanted["kind"] in FIXED and wanted["spec"] != held["spec"]:
        wrong.append("spec: Forbidden: it cannot be changed")
    if wrong:
        raise Refused(422, "Invalid", f"{wanted['kind']} is invalid: {'; '.join(wrong)}")


def _resource(name: str, kind: str) -> Object:
    about = {"name": name, "singularName": kind.lower(), "kind": kind, "verbs": VERBS}
    return about | {"namespaced": kind != "Namespace"}


def _group(version: str) -> Object:
    name = {"groupVersion": version, "version": version.split("/")[1]}
    return {"name": version.split("/")[0], "versions": [name], "preferredVersion": name}


def _selected(held: Object, query: dict[str, str]) -> bool:
    labels = held["metadata"].get("labels", {})
    wanted = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    name = re.search("metadata.name=([^,]+)", query.get("fieldSelector", ""))
    named = name is None or held["metadata"]["name"] == name[1]
    return named and all(labels.get(part[0]) == part[-1] for part in wanted)
