package tree

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// constraints are SecurityContextConstraints of OpenShift.
type constraints struct {
	AllowHostNetwork, AllowHostPorts, AllowHostDirVolumePlugin, AllowHostPID, AllowHostIPC bool
	AllowPrivilegedContainer, AllowPrivilegeEscalation, ReadOnlyRootFilesystem             bool
	AllowedCapabilities, DefaultAddCapabilities, RequiredDropCapabilities                  []string
	SeccompProfiles, Volumes, Users, Groups                                                []string
	RunAsUser, FSGroup, SupplementalGroups                                                 struct{ Type string }
	SELinuxContext                                                                         struct {
		Type           string
		SELinuxOptions struct{ User, Role, Type, Level string }
	}
	Priority int
}

// openshift is what the chart renders for OpenShift.
type openshift struct {
	constraints map[string]constraints
	roles       map[string]rbacv1.Role
	bindings    map[string]rbacv1.RoleBinding
}

func renderOpenShift(t *testing.T, args ...string) openshift {
	t.Helper()
	o := openshift{map[string]constraints{}, map[string]rbacv1.Role{}, map[string]rbacv1.RoleBinding{}}
	for _, doc := range documents(t, args...) {
		var meta metav1.PartialObjectMetadata
		unmarshal(t, doc, &meta)
		switch meta.Kind {
		case "SecurityContextConstraints":
			var c constraints
			unmarshal(t, doc, &c)
			o.constraints[meta.Name] = c
		case "Role":
			var r rbacv1.Role
			unmarshal(t, doc, &r)
			o.roles[r.Name] = r
		case "RoleBinding":
			var b rbacv1.RoleBinding
			unmarshal(t, doc, &b)
			o.bindings[b.Name] = b
		}
	}
	return o
}

// needs returns the constraints that admit a pod on a node, and nothing that it does not use.
func needs(pod corev1.PodSpec) constraints {
	c := constraints{
		AllowHostNetwork: pod.HostNetwork, AllowHostPorts: pod.HostNetwork, AllowHostPID: pod.HostPID, AllowHostIPC: pod.HostIPC,
		ReadOnlyRootFilesystem: true, DefaultAddCapabilities: []string{}, RequiredDropCapabilities: []string{}, Users: []string{}, Groups: []string{},
	}
	for _, v := range pod.Volumes {
		switch {
		case v.HostPath != nil:
			c.AllowHostDirVolumePlugin = true
			c.Volumes = append(c.Volumes, "hostPath")
		case v.Secret != nil:
			c.Volumes = append(c.Volumes, "secret")
		case v.ConfigMap != nil:
			c.Volumes = append(c.Volumes, "configMap")
		}
	}
	if pod.AutomountServiceAccountToken == nil { // the volume with the token
		c.Volumes = append(c.Volumes, "projected")
	}
	slices.Sort(c.Volumes)
	c.Volumes = slices.Compact(c.Volumes)
	for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
		s := container.SecurityContext
		if s == nil {
			continue
		}
		if s.Privileged != nil && *s.Privileged {
			c.AllowPrivilegedContainer, c.AllowPrivilegeEscalation = true, true
		}
		if s.Capabilities != nil {
			for _, a := range s.Capabilities.Add {
				c.AllowedCapabilities = append(c.AllowedCapabilities, string(a))
			}
		}
		if p := s.SeccompProfile; p != nil {
			c.SeccompProfiles = []string{map[corev1.SeccompProfileType]string{"RuntimeDefault": "runtime/default", "Unconfined": "unconfined"}[p.Type]}
		}
	}
	c.RunAsUser.Type, c.FSGroup.Type, c.SupplementalGroups.Type = "RunAsAny", "RunAsAny", "RunAsAny"
	c.SELinuxContext.Type = "MustRunAs"
	o := &c.SELinuxContext.SELinuxOptions
	o.User, o.Role, o.Type, o.Level = "system_u", "system_r", "spc_t", "s0"
	return c
}

// On OpenShift, agents and gateways have constraints that admit exactly their pods, which their ServiceAccounts alone may use in the
// namespace of the release. The pods of controllers name no user and no group, as restricted-v2 wants it.
func TestChartOpenShift(t *testing.T) {
	t.Parallel()
	const on = all + ",openshift.enabled=true"
	for _, set := range []string{
		on, on + ",agent.bpffs.mount=false", on + ",agent.capabilities.sysAdmin=false,agent.seccompProfile=Unconfined", on + ",gateway.balancer=nftables,gateway.capabilities.netRaw=false",
		on + ",agent.seccompProfile=null,gateway.seccompProfile=null",
		on + ",agent.extraVolumes[0].name=certs,agent.extraVolumes[0].configMap.name=certs,gateway.extraVolumes[0].name=certs,gateway.extraVolumes[0].secret.secretName=certs",
	} {
		t.Run(set, func(t *testing.T) {
			t.Parallel()
			have := renderOpenShift(t, "--set", set)
			rendered := renderGuards(t, "--set", set)
			for name, w := range rendered.workloads {
				if !w.onNodes {
					checkRestrictedV2(t, name, w.pod.Spec)
					continue
				}
				if diff := cmp.Diff(needs(w.pod.Spec), have.constraints[name]); diff != "" {
					t.Errorf("constraints of %s (-want +have):\n%s", name, diff)
				}
				checkUse(t, have, name)
			}
			for name, pod := range rendered.hooks {
				checkRestrictedV2(t, name, pod)
			}
			if len(have.constraints) != 2 {
				t.Errorf("constraints: %v", have.constraints)
			}
		})
	}
	for _, set := range []string{all, "openshift=null", "openshift.enabled=true"} { // null: as after an upgrade with --reuse-values
		want := map[string]int{"openshift.enabled=true": 1}[set] // without gateways
		if n := len(renderOpenShift(t, "--set", set).constraints); n != want {
			t.Errorf("--set %s: %d constraints, want %d", set, n, want)
		}
	}
}

// checkUse checks that the account of a component alone may use its constraints.
func checkUse(t *testing.T, o openshift, component string) {
	t.Helper()
	name := component + "-constraints"
	rules := []rbacv1.PolicyRule{{APIGroups: []string{"security.openshift.io"}, Resources: []string{"securitycontextconstraints"}, ResourceNames: []string{component}, Verbs: []string{"use"}}}
	if diff := cmp.Diff(rules, o.roles[name].Rules); diff != "" {
		t.Errorf("Role %s (-want +have):\n%s", name, diff)
	}
	b := o.bindings[name]
	if diff := cmp.Diff([]rbacv1.Subject{{Kind: "ServiceAccount", Name: component, Namespace: "isthmus-system"}}, b.Subjects); diff != "" || b.RoleRef.Name != name || b.RoleRef.Kind != "Role" {
		t.Errorf("RoleBinding %s of %+v (-want +have):\n%s", name, b.RoleRef, diff)
	}
}

// checkRestrictedV2 checks what OpenShift's restricted-v2 refuses beyond the PodSecurity level `restricted`: users and groups
// outside of the ranges of the namespace, which a chart cannot know.
func checkRestrictedV2(t *testing.T, name string, pod corev1.PodSpec) {
	t.Helper()
	s := pod.SecurityContext
	if s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Fatalf("%s: security context %+v", name, s)
	}
	for field, id := range map[string]*int64{"runAsUser": s.RunAsUser, "runAsGroup": s.RunAsGroup, "fsGroup": s.FSGroup} {
		if id != nil {
			t.Errorf("%s: %s is %d", name, field, *id)
		}
	}
	if len(s.SupplementalGroups) > 0 || s.SELinuxOptions != nil || pod.HostNetwork || pod.HostPID || pod.HostIPC {
		t.Errorf("%s: %+v", name, pod)
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		s := c.SecurityContext
		if s.RunAsUser != nil || s.RunAsGroup != nil || *s.AllowPrivilegeEscalation || fmt.Sprint(s.Capabilities.Drop) != "[ALL]" || len(s.Capabilities.Add) > 0 {
			t.Errorf("%s, container %s: %+v", name, c.Name, s)
		}
	}
	for _, v := range pod.Volumes {
		if v.ConfigMap == nil && v.Secret == nil && v.EmptyDir == nil && v.Projected == nil && v.DownwardAPI == nil {
			t.Errorf("%s: restricted-v2 refuses volume %s", name, v.Name)
		}
	}
}
