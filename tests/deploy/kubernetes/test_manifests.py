"""What the chart renders: valid for Kubernetes, and its objects agree with each other."""

from functools import cache
from importlib.metadata import version
from typing import Any

import jsonschema
import pytest
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import utils
from referencing import Registry, Resource

from tests.deploy.dockerfile import DOCKERFILES, stages
from tests.deploy.kubernetes.custom_resources import SCHEMAS
from tests.deploy.kubernetes.releases import VALUES, each_release, needs_helm, pods, release
from tests.tools.helm import CHART, Manifest, Rendered, lint, render
from tests.tools.kubernetes_manifests import FOLDER, MODES, manifests

pytestmark = needs_helm
METADATA: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
OLDEST = utils.major_minor(METADATA["kubeVersion"].removeprefix(">="))
NEWEST = utils.major_minor(utils.latest_version())


@cache
def definitions(folder: str) -> Registry[Any]:
    """Return the definitions that all schemas of a version of Kubernetes refer to. They have megabytes."""
    contents = utils.schema_contents(f"{folder}/_definitions.json", "")
    return (Resource.from_contents(contents) @ Registry()).crawl()


@cache
def validator(api_version: str, kind: str, kubernetes_version: str) -> Draft202012Validator:
    """Return a check for fields that Kubernetes does not know, lacks, or that have wrong values."""
    if kind in SCHEMAS:
        return Draft202012Validator(SCHEMAS[kind])
    [number] = {each for each in utils.all_versions() if utils.major_minor(each) == kubernetes_version}
    folder = f"kubernetes-json-schema/v{number}-local-strict"
    group, _, version = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], version)))
    schema = utils.schema_contents(f"{folder}/{name}.json", number)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ definitions(folder))


def validate(manifest: Manifest, kubernetes_version: str) -> None:
    """Raise ValidationError for what Kubernetes would refuse."""
    validator(manifest["apiVersion"], manifest["kind"], kubernetes_version).validate(manifest)


def is_selected(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Say whether a selector finds a pod. A LeaderWorkerSet's controller adds the label of the pod's place."""
    ours = {key: value for key, value in selector.items() if not key.startswith("leaderworkerset.sigs.k8s.io/")}
    return ours.items() <= labels.items()


def selected(rendered: Rendered, selector: dict[str, str]) -> list[Manifest]:
    return [pod for _, pod in pods(rendered) if is_selected(selector, pod["metadata"].get("labels", {}))]


def port_names(pod: Manifest) -> dict[str, int]:
    ports = (port for each in pod["spec"]["containers"] for port in each.get("ports", ()))
    return {port["name"]: port["containerPort"] for port in ports}


@each_release
@pytest.mark.parametrize("kubernetes_version", [OLDEST, NEWEST])
def test_manifests_keep_to_their_schemas(name: str, kubernetes_version: str) -> None:
    for manifest in release(name).manifests:
        validate(manifest, kubernetes_version)
    for title, pod in pods(release(name)):
        if title.endswith((" leader", " worker")):  # which the schema of their own resource leaves open
            whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": title}, "spec": pod["spec"]}
            validate(whole, kubernetes_version)


def test_a_field_that_nobody_knows_is_found() -> None:
    """The check would prove nothing if it let typing errors pass."""
    for manifest in (*release("fleet").manifests, *release("several-nodes").manifests):
        if "spec" in manifest:
            wrong = {**manifest, "spec": {**manifest["spec"], "repicas": 1}}
            with pytest.raises(jsonschema.ValidationError, match="repicas"):
                validate(wrong, NEWEST)


@each_release
def test_objects_have_names_of_their_own_and_the_release_s_namespace(name: str) -> None:
    rendered = release(name)
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered.manifests]
    assert len(names) == len(set(names))
    assert {each["metadata"]["namespace"] for each in rendered.manifests} == {"llm"}


@each_release
def test_long_names_leave_room_for_what_kubernetes_adds(name: str) -> None:
    """The controller of StatefulSets has a label of the set's name and eleven characters, and labels have 63."""
    rendered = render(VALUES[name] | {"fullnameOverride": "a" * 80})
    assert all(len(each["metadata"]["name"]) <= 52 for each in rendered.manifests)


@each_release
def test_selectors_find_the_pods_that_are_meant(name: str) -> None:
    rendered = release(name)
    for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "InferencePool"):
        for title, manifest in rendered.find_all(kind).items():
            spec = manifest["spec"]
            selector = spec["podSelector"] if kind == "NetworkPolicy" else spec["selector"]
            found = selected(rendered, selector.get("matchLabels", selector))
            assert len({pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in found}) == 1, (kind, title)
    for kind in ("Deployment", "StatefulSet"):
        for manifest in rendered.find_all(kind).values():
            [_] = selected(rendered, manifest["spec"]["selector"]["matchLabels"])


@each_release
def test_ports_have_the_names_by_which_others_call_them(name: str) -> None:
    rendered = release(name)
    for service in rendered.find_all("Service").values():
        for pod in selected(rendered, service["spec"]["selector"]):
            known = port_names(pod)
            is_worker = pod["spec"]["containers"][0]["name"] == "worker"
            assert is_worker or {port["targetPort"] for port in service["spec"]["ports"]} <= known.keys()
    for policy in rendered.find_all("NetworkPolicy").values():
        known = {}
        for pod in selected(rendered, policy["spec"]["podSelector"]["matchLabels"]):
            known |= port_names(pod)
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())} <= known.keys()
    for _, pod in pods(rendered):
        for container in pod["spec"]["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if "httpGet" in container.get(probe, {}):
                    assert container[probe]["httpGet"]["port"] in port_names(pod)


@each_release
def test_monitors_scrape_ports_that_are_there(name: str) -> None:
    rendered = release(name)
    for monitor in rendered.find_all("ServiceMonitor").values():
        labels = monitor["spec"]["selector"]["matchLabels"]
        services = [
            each
            for each in rendered.find_all("Service").values()
            if labels.items() <= each["metadata"]["labels"].items()
        ]
        [service] = services
        named = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= named
    for monitor in rendered.find_all("PodMonitor").values():
        engines = selected(rendered, monitor["spec"]["selector"]["matchLabels"])
        assert any("health" in port_names(pod) for pod in engines)
    for pool in rendered.find_all("InferencePool").values():
        [pod] = selected(rendered, pool["spec"]["selector"]["matchLabels"])
        assert {port["number"] for port in pool["spec"]["targetPorts"]} == {port_names(pod)["http"]}


@each_release
def test_what_scales_is_there_and_has_no_other_number_of_replicas(name: str) -> None:
    rendered = release(name)
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for scaler in rendered.find_all(kind).values():
            target = scaler["spec"]["scaleTargetRef"]
            found = rendered.find(target["kind"], target["name"])
            assert found["apiVersion"] == target["apiVersion"]
            assert "replicas" not in found["spec"]


def test_both_scalers_ask_for_the_pressure_at_the_service() -> None:
    hpa = release("all-fleet").find("HorizontalPodAutoscaler", "sluice-engine")
    [metric] = hpa["spec"]["metrics"]
    assert metric["object"]["metric"]["name"] == "sluice_scale_pressure"
    assert metric["object"]["describedObject"]["name"] in release("all-fleet").find_all("Service")
    [trigger] = release("fleet").find("ScaledObject", "sluice-engine")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'max(sluice_scale_pressure{namespace="llm",service="sluice"})'
    assert trigger["metricType"] == "Value"


@each_release
def test_volumes_are_mounted_and_mounts_have_volumes(name: str) -> None:
    rendered = release(name)
    sets = rendered.find_all("StatefulSet").values()
    claimed = {claim["metadata"]["name"] for each in sets for claim in each["spec"].get("volumeClaimTemplates", ())}
    claims = rendered.find_all("PersistentVolumeClaim")
    secrets = rendered.find_all("Secret")
    for title, pod in pods(rendered):
        spec = pod["spec"]
        known = {volume["name"] for volume in spec.get("volumes", ())}
        used = {
            mount["name"]
            for container in (*spec.get("initContainers", ()), *spec["containers"])
            for mount in container.get("volumeMounts", ())
        }
        assert known <= used <= known | claimed, title
        for volume in spec.get("volumes", ()):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", "models")
            assert claim in {"models", "documents", *claims}
            secret = volume.get("secret", {}).get("secretName", "sluice-access")
            assert secret in {"sluice-access", "sluice-curve", *secrets}


@each_release
def test_pods_can_do_no_more_than_they_must(name: str) -> None:
    for title, pod in pods(release(name)):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, title
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostNetwork" not in spec and "hostIPC" not in spec and "hostPID" not in spec
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@each_release
def test_only_gateways_of_a_fleet_read_endpoint_slices(name: str) -> None:
    rendered = release(name)
    for title, pod in pods(rendered):
        assert pod["spec"]["automountServiceAccountToken"] is title.endswith("-gateway"), title
    roles = rendered.find_all("Role")
    assert bool(roles) == any(title.endswith("-gateway") for title, _ in pods(rendered))
    for role in roles.values():
        rules = [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
        assert role["rules"] == rules
    for binding in rendered.find_all("RoleBinding").values():
        assert binding["roleRef"]["name"] in roles
        [subject] = binding["subjects"]
        gateway = dict(pods(rendered))["sluice-gateway"]
        assert subject["name"] == gateway["spec"]["serviceAccountName"]


def test_engines_are_reached_by_gateways_alone() -> None:
    policy = release("fleet").find("NetworkPolicy", "sluice-engine")
    rules = {port["port"]: rule["from"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    [source] = rules["engine"]
    [gateway] = selected(release("fleet"), source["podSelector"]["matchLabels"])
    assert gateway["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"
    assert all("podSelector" in source for source in rules["health"])


def test_a_closed_server_still_answers_helm_test() -> None:
    policy = release("all-single").find("NetworkPolicy", "sluice-server")
    [rule] = (rule for rule in policy["spec"]["ingress"] if {"protocol": "TCP", "port": "http"} in rule["ports"])
    chosen = [each["podSelector"]["matchLabels"] for each in rule["from"] if "podSelector" in each]
    [labels] = chosen
    [tester] = release("all-single").find_all("Pod").values()
    assert labels.items() <= tester["metadata"]["labels"].items()


def test_the_user_is_the_image_s() -> None:
    [user] = stages(DOCKERFILES[0])[-1].texts("USER")
    context = dict(pods(release("defaults")))["sluice"]["spec"]["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user


def test_a_shared_gpu_s_server_leaves_dev_shm_to_the_device_plugin() -> None:
    shared = dict(pods(release("shared-gpu")))["sluice"]["spec"]
    assert "shm" not in {volume["name"] for volume in shared["volumes"]}
    alone = dict(pods(release("gpu")))["sluice"]["spec"]
    [volume] = (volume for volume in alone["volumes"] if volume["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}


@each_release
def test_shared_memory_fits_into_the_pod_s_memory(name: str) -> None:
    """Kubernetes counts /dev/shm as memory of the pod, and kills it at its limit."""
    for title, pod in pods(release(name)):
        sizes = [each["emptyDir"]["sizeLimit"] for each in pod["spec"].get("volumes", ()) if each["name"] == "shm"]
        for size in sizes:
            limit = pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
            assert int(size.removesuffix("Gi")) < int(limit.removesuffix("Gi")), title


def test_gateways_may_have_the_image_without_gpus() -> None:
    images = {name: pod["spec"]["containers"][0]["image"] for name, pod in pods(release("fleet"))}
    assert images["sluice-gateway"] == images["sluice-ready"] == "registry.example.com/sluice:cpu"
    assert images["sluice-engine"] == "registry.example.com/sluice:gpu"
    assert dict(pods(release("gpu")))["sluice"]["spec"]["containers"][0]["image"].endswith(":gpu")


def test_gpus_are_limits_and_their_taint_is_tolerated() -> None:
    spec = dict(pods(release("gpu")))["sluice"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    fleet = dict(pods(release("fleet")))
    assert "nvidia.com/gpu" not in fleet["sluice-gateway"]["spec"]["containers"][0]["resources"]["limits"]


def test_an_ingress_lets_streams_pass_as_they_come() -> None:
    annotations = release("gpu").find("Ingress", "sluice")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) == 3600
    grpc = release("gpu").find("Ingress", "sluice-grpc")["metadata"]["annotations"]
    assert grpc["nginx.ingress.kubernetes.io/backend-protocol"] == "GRPC"
    own = release("all-single").find("Ingress", "sluice")["metadata"]["annotations"]
    assert own["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "60"


def test_a_new_key_replaces_the_pods() -> None:
    def checksum(key: str) -> str:
        pod = dict(pods(render({"auth": {"apiKey": key}})))["sluice"]
        found: str = pod["metadata"]["annotations"]["checksum/secret"]
        return found

    assert checksum("one") != checksum("another")


def test_secrets_are_in_no_argument_and_no_variable() -> None:
    rendered = release("all-single")
    assert rendered.find("Secret", "sluice")["stringData"] == {"api-key": 'a "key": 1', "token": "hf_token"}
    for title, pod in pods(rendered):
        assert "hf_token" not in str(pod) and "a \\" not in str(pod), title


def test_helm_lint_asks_for_an_icon_and_no_more() -> None:
    assert [each["error"] for each in lint()] == ["icon is recommended"]


def test_the_chart_is_of_this_version() -> None:
    assert METADATA["appVersion"] == METADATA["version"] == version("sluice")


@pytest.mark.parametrize("mode", MODES)
def test_plain_manifests_are_current(mode: str) -> None:
    text = (FOLDER / f"{mode}.yaml").read_text()
    assert text == manifests(mode), "run `python -m tests.tools.kubernetes_manifests`"
    assert "Helm" not in "".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for manifest in yaml.safe_load_all(text):
        validate(manifest, NEWEST)
