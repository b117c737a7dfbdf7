package tree

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// components are the workloads of the chart by their values.
var components = map[string]string{
	"agent": "isthmus-agent", "controller": "isthmus-controller", "gateway": "isthmus-gateway", "gatewayController": "isthmus-gateway-controller",
}

// options are values that every component takes, in the form of Kubernetes.
const options = `
  podLabels: {example.org/team: net}
  podAnnotations: {example.org/note: own, example.org/both: component}
  serviceAccount: {annotations: {example.org/role: reader}}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [n1]}]}]}}}
  nodeSelector: {example.org/pool: edge}
  tolerations: [{key: example.org/pool, operator: Exists}]
  extraEnv: [{name: HTTPS_PROXY, value: "http://proxy.example.org:3128"}]
  extraVolumeMounts: [{name: certs, mountPath: /etc/ssl/certs, readOnly: true}]
  extraVolumes: [{name: certs, configMap: {name: site-certs}}]
  extraContainers: [{name: sidecar, image: example.org/sidecar:v1}]
`

// Every component takes the options that administrators expect of a chart. Without them it runs on Linux nodes, and agents run on
// all of those.
func TestChartOptions(t *testing.T) {
	t.Parallel()
	values := "podAnnotations: {example.org/all: yes!, example.org/both: all}\n"
	for name := range components {
		values += name + ":" + options
		if name == "gateway" || name == "agent" {
			values += "  updateStrategy: {type: OnDelete}\n"
		} else {
			values += "  updateStrategy: {type: Recreate}\n  topologySpreadConstraints: [{maxSkew: 2, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]\n"
		}
		if strings.HasPrefix(name, "gateway") {
			values += "  enabled: true\n"
		}
	}
	values = strings.Replace(values, "gateway:\n", "gateway:\n  cluster: a\n", 1)
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		t.Fatal(err)
	}
	rendered := renderGuards(t, "--values", file)
	for values, name := range components {
		pod, strategy := rendered.workloads[name].pod, rendered.workloads[name].strategy
		for what, ok := range map[string]bool{
			"podLabels": pod.Labels["example.org/team"] == "net" && pod.Labels["app.kubernetes.io/name"] == name,
			"podAnnotations": pod.Annotations["example.org/note"] == "own" && pod.Annotations["example.org/all"] == "yes!" &&
				pod.Annotations["example.org/both"] == "component",
			"serviceAccount":  rendered.accounts[name]["example.org/role"] == "reader",
			"affinity":        pod.Spec.Affinity != nil && pod.Spec.Affinity.NodeAffinity != nil,
			"nodeSelector":    pod.Spec.NodeSelector["example.org/pool"] == "edge" && pod.Spec.NodeSelector["kubernetes.io/os"] == "linux",
			"tolerations":     len(pod.Spec.Tolerations) == 1 && pod.Spec.Tolerations[0].Key == "example.org/pool",
			"extraEnv":        slices.ContainsFunc(pod.Spec.Containers[0].Env, func(e corev1.EnvVar) bool { return e.Name == "HTTPS_PROXY" }),
			"extraContainers": len(pod.Spec.Containers) == 2 && pod.Spec.Containers[1].Name == "sidecar",
			"extraVolumes":    slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "certs" && v.ConfigMap != nil }),
			"extraVolumeMounts": slices.ContainsFunc(pod.Spec.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == "/etc/ssl/certs"
			}),
			"updateStrategy": strategy == "OnDelete" || strategy == "Recreate",
			"topologySpreadConstraints": strategy == "OnDelete" ||
				len(pod.Spec.TopologySpreadConstraints) == 1 && pod.Spec.TopologySpreadConstraints[0].TopologyKey == "zone",
		} {
			if !ok {
				t.Errorf("%s.%s has no effect: %+v", values, what, pod)
			}
		}
	}
	pods := renderGuards(t, "--set", all).workloads
	for _, name := range slices.Sorted(maps.Values(components)) {
		if pods[name].pod.Spec.NodeSelector["kubernetes.io/os"] != "linux" {
			t.Errorf("%s runs on nodes with %v", name, pods[name].pod.Spec.NodeSelector)
		}
	}
	without := renderGuards(t, "--set", "agent.tolerations=null").workloads // as after `helm upgrade --reuse-values` from a chart without it
	for _, pod := range []corev1.PodTemplateSpec{pods["isthmus-agent"].pod, without["isthmus-agent"].pod} {
		if have := pod.Spec.Tolerations; len(have) != 1 || have[0].Operator != corev1.TolerationOpExists || have[0].Key != "" {
			t.Errorf("agents tolerate %+v, want everything", have)
		}
	}
}

// An image has the digest of its name, unless a tag is set.
func TestChartDigests(t *testing.T) {
	t.Parallel()
	digest := "sha256:" + strings.Repeat("0a", 32)
	for args, want := range map[string]string{
		"image.registry=example.org/team":            "example.org/team/isthmus/agent:dev@" + digest,
		"image.tag=v1":                               "isthmus/agent:v1",
		"agent.image=mine/agent":                     "mine/agent:dev",
		"image.registry=example.org,log.level=debug": "example.org/isthmus/agent:dev@" + digest,
	} {
		pods := renderGuards(t, "--set", args, "--set-json", fmt.Sprintf(`image.digests={"isthmus/agent": %q}`, digest)).workloads
		pod := pods["isthmus-agent"].pod.Spec
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			if c.Image != want {
				t.Errorf("with %s: image %s, want %s", args, c.Image, want)
			}
		}
		if have := pods["isthmus-controller"].pod.Spec.Containers[0].Image; strings.Contains(have, "@") {
			t.Errorf("with %s: image %s has the digest of another", args, have)
		}
	}
}
