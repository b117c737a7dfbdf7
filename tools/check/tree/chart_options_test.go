package tree

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	pods, strategies, accounts := podsOf(t, "--values", file)
	for values, name := range components {
		pod := pods[name]
		for what, ok := range map[string]bool{
			"podLabels": pod.Labels["example.org/team"] == "net" && pod.Labels["app.kubernetes.io/name"] == name,
			"podAnnotations": pod.Annotations["example.org/note"] == "own" && pod.Annotations["example.org/all"] == "yes!" &&
				pod.Annotations["example.org/both"] == "component",
			"serviceAccount":  accounts[name]["example.org/role"] == "reader",
			"affinity":        pod.Spec.Affinity != nil && pod.Spec.Affinity.NodeAffinity != nil,
			"nodeSelector":    pod.Spec.NodeSelector["example.org/pool"] == "edge" && pod.Spec.NodeSelector["kubernetes.io/os"] == "linux",
			"tolerations":     len(pod.Spec.Tolerations) == 1 && pod.Spec.Tolerations[0].Key == "example.org/pool",
			"extraEnv":        slices.ContainsFunc(pod.Spec.Containers[0].Env, func(e corev1.EnvVar) bool { return e.Name == "HTTPS_PROXY" }),
			"extraContainers": len(pod.Spec.Containers) == 2 && pod.Spec.Containers[1].Name == "sidecar",
			"extraVolumes":    slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "certs" && v.ConfigMap != nil }),
			"extraVolumeMounts": slices.ContainsFunc(pod.Spec.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == "/etc/ssl/certs"
			}),
			"updateStrategy": strategies[name] == "OnDelete" || strategies[name] == "Recreate",
			"topologySpreadConstraints": strategies[name] == "OnDelete" ||
				len(pod.Spec.TopologySpreadConstraints) == 1 && pod.Spec.TopologySpreadConstraints[0].TopologyKey == "zone",
		} {
			if !ok {
				t.Errorf("%s.%s has no effect: %+v", values, what, pod)
			}
		}
	}
	pods, _, _ = podsOf(t, "--set", all)
	for _, name := range slices.Sorted(maps.Values(components)) {
		if pods[name].Spec.NodeSelector["kubernetes.io/os"] != "linux" {
			t.Errorf("%s runs on nodes with %v", name, pods[name].Spec.NodeSelector)
		}
	}
	without, _, _ := podsOf(t, "--set", "agent.tolerations=null") // as after `helm upgrade --reuse-values` from a chart without it
	for _, pod := range []corev1.PodTemplateSpec{pods["isthmus-agent"], without["isthmus-agent"]} {
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
		pods, _, _ := podsOf(t, "--set", args, "--set-json", fmt.Sprintf(`image.digests={"isthmus/agent": %q}`, digest))
		pod := pods["isthmus-agent"].Spec
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			if c.Image != want {
				t.Errorf("with %s: image %s, want %s", args, c.Image, want)
			}
		}
		if have := pods["isthmus-controller"].Spec.Containers[0].Image; strings.Contains(have, "@") {
			t.Errorf("with %s: image %s has the digest of another", args, have)
		}
	}
}

// podsOf renders the chart and returns the pods and update strategies of its workloads, and the annotations of its accounts, by name.
func podsOf(t *testing.T, args ...string) (pods map[string]corev1.PodTemplateSpec, strategies map[string]string, accounts map[string]map[string]string) {
	t.Helper()
	pods, strategies, accounts = map[string]corev1.PodTemplateSpec{}, map[string]string{}, map[string]map[string]string{}
	for _, doc := range documents(t, args...) {
		var object metav1.PartialObjectMetadata
		unmarshal(t, doc, &object)
		switch object.Kind {
		case "Deployment":
			var d appsv1.Deployment
			unmarshal(t, doc, &d)
			pods[d.Name], strategies[d.Name] = d.Spec.Template, string(d.Spec.Strategy.Type)
		case "DaemonSet":
			var d appsv1.DaemonSet
			unmarshal(t, doc, &d)
			pods[d.Name], strategies[d.Name] = d.Spec.Template, string(d.Spec.UpdateStrategy.Type)
		case "ServiceAccount":
			accounts[object.Name] = object.Annotations
		}
	}
	return pods, strategies, accounts
}
