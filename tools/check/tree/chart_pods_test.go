package tree

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// all is the chart with every component.
const all = "gateway.enabled=true,gateway.cluster=east,gatewayController.enabled=true"

// workload is a Deployment or a DaemonSet of the chart. Pods of DaemonSets belong to nodes.
type workload struct {
	replicas int32
	pod      corev1.PodTemplateSpec
	onNodes  bool
	strategy string // of updates
}

// guards are the rendered objects around the pods of the chart.
type guards struct {
	workloads  map[string]workload
	policies   map[string]networkingv1.NetworkPolicySpec
	budgets    map[string]policyv1.PodDisruptionBudgetSpec
	namespaces map[string]corev1.Namespace
	hooks      map[string]corev1.PodSpec    // pods that Helm runs for a moment
	accounts   map[string]map[string]string // annotations of ServiceAccounts
}

// renderGuards renders the chart with values.
func renderGuards(t *testing.T, args ...string) guards {
	t.Helper()
	g := guards{map[string]workload{}, map[string]networkingv1.NetworkPolicySpec{}, map[string]policyv1.PodDisruptionBudgetSpec{}, map[string]corev1.Namespace{}, map[string]corev1.PodSpec{}, map[string]map[string]string{}}
	for _, doc := range documents(t, args...) {
		var object metav1.PartialObjectMetadata
		unmarshal(t, doc, &object)
		switch object.Kind {
		case "Deployment":
			var d appsv1.Deployment
			unmarshal(t, doc, &d)
			g.workloads[d.Name] = workload{*d.Spec.Replicas, d.Spec.Template, false, string(d.Spec.Strategy.Type)}
		case "DaemonSet":
			var d appsv1.DaemonSet
			unmarshal(t, doc, &d)
			g.workloads[d.Name] = workload{0, d.Spec.Template, true, string(d.Spec.UpdateStrategy.Type)}
		case "NetworkPolicy":
			var p networkingv1.NetworkPolicy
			unmarshal(t, doc, &p)
			g.policies[p.Name] = p.Spec
		case "PodDisruptionBudget":
			var b policyv1.PodDisruptionBudget
			unmarshal(t, doc, &b)
			g.budgets[b.Name] = b.Spec
		case "Namespace":
			var n corev1.Namespace
			unmarshal(t, doc, &n)
			g.namespaces[n.Name] = n
		case "ServiceAccount":
			g.accounts[object.Name] = object.Annotations
		case "Pod":
			var p corev1.Pod
			unmarshal(t, doc, &p)
			if p.Annotations["helm.sh/hook"] == "" {
				t.Fatalf("Pod %s is not a hook", p.Name)
			}
			g.hooks[p.Name] = p.Spec
		case "ReplicaSet", "StatefulSet", "Job", "CronJob":
			t.Fatalf("%s %s: this test does not know its pods", object.Kind, object.Name)
		}
	}
	return g
}

func unmarshal(t *testing.T, doc string, into any) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(doc), into); err != nil {
		t.Fatalf("parse the output of helm: %v\n%s", err, doc)
	}
}

// Every container has the runtime's seccomp profile, AppArmor's where the node has it, a read-only root file system and no way
// to more privileges. The one exception mounts the BPF file system and ends. The pods of controllers meet the PodSecurity
// level `restricted`.
func TestChartConfinesPods(t *testing.T) {
	t.Parallel()
	for _, set := range []string{
		all, all + ",agent.capabilities.sysAdmin=false", all + ",gateway.balancer=nftables", all + ",controller.federation.enabled=true,controller.federation.cloudsSecret=c",
		all + ",agent.seccompProfile=null,gateway.seccompProfile=null", // as after an upgrade with --reuse-values
	} {
		t.Run(set, func(t *testing.T) {
			t.Parallel()
			rendered := renderGuards(t, "--set", set)
			for name, pod := range rendered.hooks {
				checkContainer(t, name, pod, pod.Containers[0])
				checkRestricted(t, name, pod)
			}
			workloads := rendered.workloads
			want := []string{"isthmus-agent", "isthmus-controller", "isthmus-gateway", "isthmus-gateway-controller"}
			if diff := cmp.Diff(want, slices.Sorted(maps.Keys(workloads))); diff != "" {
				t.Fatalf("workloads (-want +have):\n%s", diff)
			}
			for name, w := range workloads {
				pod := w.pod.Spec
				for _, c := range pod.InitContainers {
					if onlyMounts(c) {
						continue
					}
					checkContainer(t, name, pod, c)
				}
				for _, c := range pod.Containers {
					checkContainer(t, name, pod, c)
				}
				if !w.onNodes {
					checkRestricted(t, name, pod)
				}
			}
		})
	}
}

// onlyMounts reports whether a container is the privileged one that mounts the BPF file system.
func onlyMounts(c corev1.Container) bool {
	return c.Name == "mount-bpffs" && len(c.Args) == 2 && c.Args[0] == "mount-bpffs" && len(c.VolumeMounts) == 1 && *c.SecurityContext.ReadOnlyRootFilesystem
}

func checkContainer(t *testing.T, name string, pod corev1.PodSpec, c corev1.Container) {
	t.Helper()
	s := c.SecurityContext
	if s == nil {
		t.Fatalf("%s, container %s: there is no security context", name, c.Name)
	}
	seccomp := s.SeccompProfile
	if seccomp == nil && pod.SecurityContext != nil {
		seccomp = pod.SecurityContext.SeccompProfile
	}
	yes := func(b *bool) bool { return b != nil && *b }
	faults := map[string]bool{
		"is privileged":                       yes(s.Privileged),
		"may gain privileges":                 s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation,
		"may write to its root file system":   !yes(s.ReadOnlyRootFilesystem),
		"keeps capabilities":                  s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}),
		"has no default seccomp profile":      seccomp == nil || seccomp.Type != corev1.SeccompProfileTypeRuntimeDefault,
		"runs on nodes with AppArmor only":    s.AppArmorProfile != nil && s.AppArmorProfile.Type == corev1.AppArmorProfileTypeRuntimeDefault,
		"is not confined by AppArmor":         s.AppArmorProfile != nil && s.AppArmorProfile.Type == corev1.AppArmorProfileTypeUnconfined,
		"shares the node's processes or IPC":  pod.HostPID || pod.HostIPC,
		"has a limit of memory that is empty": c.Resources.Limits.Memory().IsZero(),
	}
	for fault, is := range faults {
		if is {
			t.Errorf("%s, container %s: %s", name, c.Name, fault)
		}
	}
	for _, m := range c.VolumeMounts {
		// AppArmor's default profiles forbid it.
		if !m.ReadOnly && strings.HasPrefix(m.MountPath, "/sys/") {
			t.Errorf("%s, container %s: it writes to %s, which AppArmor forbids", name, c.Name, m.MountPath)
		}
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if v := pod.Volumes[i]; !m.ReadOnly && v.HostPath == nil && v.EmptyDir == nil {
			t.Errorf("%s, container %s: it may write to %s, which is neither the node's nor an emptyDir", name, c.Name, m.MountPath)
		}
	}
}

// checkRestricted checks the rules of the PodSecurity level `restricted` that checkContainer does not.
func checkRestricted(t *testing.T, name string, pod corev1.PodSpec) {
	t.Helper()
	if pod.HostNetwork || pod.SecurityContext == nil || pod.SecurityContext.RunAsNonRoot == nil || !*pod.SecurityContext.RunAsNonRoot ||
		pod.SecurityContext.RunAsUser == nil || *pod.SecurityContext.RunAsUser == 0 {
		t.Errorf("%s: host network %v, security context %+v", name, pod.HostNetwork, pod.SecurityContext)
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			t.Errorf("%s: it mounts %s of the node", name, v.HostPath.Path)
		}
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		if s := c.SecurityContext; len(s.Capabilities.Add) > 0 || s.RunAsUser != nil || s.RunAsNonRoot != nil {
			t.Errorf("%s, container %s: %+v", name, c.Name, s)
		}
		for _, p := range c.Ports {
			if p.HostPort != 0 {
				t.Errorf("%s, container %s: it uses port %d of the node", name, c.Name, p.HostPort)
			}
		}
	}
}

// The scheduler and the kubelet spare the pods of Isthmus: agents and gateways as parts of their node, controllers as parts of
// the cluster. A value changes the class of each.
func TestChartPriority(t *testing.T) {
	t.Parallel()
	const empty = ",controller.priorityClassName=null,agent.priorityClassName=null,gateway.priorityClassName=null,gatewayController.priorityClassName=null"
	for _, set := range []string{all, all + empty} { // empty as after an upgrade with --reuse-values
		for name, w := range renderGuards(t, "--set", set).workloads {
			if want := map[bool]string{true: "system-node-critical", false: "system-cluster-critical"}[w.onNodes]; w.pod.Spec.PriorityClassName != want {
				t.Errorf("%s has class %q, want %q", name, w.pod.Spec.PriorityClassName, want)
			}
		}
	}
	const own = ",controller.priorityClassName=own,agent.priorityClassName=own,gateway.priorityClassName=own,gatewayController.priorityClassName=own"
	for name, w := range renderGuards(t, "--set", all+own).workloads {
		if w.pod.Spec.PriorityClassName != "own" {
			t.Errorf("%s has class %q, want the one of its values", name, w.pod.Spec.PriorityClassName)
		}
	}
}

// The pods of each controller accept connections to the ports that they serve, and to no others. Network policies do not cover
// agents and gateways, which are in the node's network.
func TestChartNetworkPolicies(t *testing.T) {
	t.Parallel()
	for _, set := range []string{all, all + ",controller.networkPolicy=null"} {
		g := renderGuards(t, "--set", set)
		for name, w := range g.workloads {
			policy, ok := g.policies[name]
			if ok == w.onNodes {
				t.Fatalf("%s: network policy %v", name, ok)
			}
			if w.onNodes {
				continue
			}
			if !selects(&policy.PodSelector, w.pod) || !slices.Contains(policy.PolicyTypes, networkingv1.PolicyTypeIngress) {
				t.Errorf("%s: the policy %+v does not restrict its pods", name, policy)
			}
			var open, served []int32
			for _, rule := range policy.Ingress {
				if len(rule.Ports) == 0 {
					t.Errorf("%s: a rule opens all ports", name)
				}
				for _, p := range rule.Ports {
					open = append(open, p.Port.IntVal)
				}
			}
			for _, c := range w.pod.Spec.Containers {
				for _, p := range c.Ports {
					served = append(served, p.ContainerPort)
				}
			}
			if diff := cmp.Diff(served, open); diff != "" {
				t.Errorf("%s: open ports (-served +open):\n%s", name, diff)
			}
		}
	}
	if off := renderGuards(t, "--set", all+",controller.networkPolicy.enabled=false,gatewayController.networkPolicy.enabled=false").policies; len(off) > 0 {
		t.Errorf("there are policies although the values turn them off: %v", off)
	}
}

// selects reports whether a selector matches the pods of a template.
func selects(s *metav1.LabelSelector, pod corev1.PodTemplateSpec) bool {
	if len(s.MatchLabels) == 0 || len(s.MatchExpressions) > 0 {
		return false
	}
	for key, value := range s.MatchLabels {
		if pod.Labels[key] != value {
			return false
		}
	}
	return true
}

// A drained node takes one replica of a controller at a time. A controller with one replica blocks no drain.
func TestChartDisruptionBudgets(t *testing.T) {
	t.Parallel()
	g := renderGuards(t, "--set", all)
	for name, w := range g.workloads {
		b, ok := g.budgets[name]
		if ok == w.onNodes {
			t.Errorf("%s: budget %v", name, ok)
		}
		if ok && (w.replicas < 2 || !selects(b.Selector, w.pod) || b.MaxUnavailable == nil || b.MaxUnavailable.IntVal != 1 ||
			b.UnhealthyPodEvictionPolicy == nil || *b.UnhealthyPodEvictionPolicy != policyv1.AlwaysAllow) {
			t.Errorf("%s with %d replicas: budget %+v", name, w.replicas, b)
		}
	}
	if one := renderGuards(t, "--set", all+",controller.replicas=1,gatewayController.replicas=1").budgets; len(one) > 0 {
		t.Errorf("controllers with one replica have budgets: %v", one)
	}
}

// On request the namespace is part of the release, admits the agents, and outlives the release.
func TestChartNamespace(t *testing.T) {
	t.Parallel()
	if n := renderGuards(t, "--set", "namespace=null").namespaces; len(n) > 0 {
		t.Errorf("the chart has a namespace unasked: %v", n)
	}
	ns := renderGuards(t, "--set", "namespace.create=true").namespaces["isthmus-system"]
	if ns.Labels["pod-security.kubernetes.io/enforce"] != "privileged" || ns.Annotations["helm.sh/resource-policy"] != "keep" {
		t.Errorf("namespace: %+v", ns.ObjectMeta)
	}
}
