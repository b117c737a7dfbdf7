package tree

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// fixedName reports whether an object keeps its name, because policies, brokers or other programs refer to it.
func fixedName(kind, name string) bool {
	return kind == "ServiceAccount" || strings.HasPrefix(kind, "ValidatingAdmissionPolicy") || kind == "Service" && name == "isthmus-dns"
}

// fullnameOverride changes the names of all objects but those that others refer to, and every reference to such a name. Nothing
// else differs: labels, ServiceAccounts and what policies and roles say stay.
func TestChartFullnameOverride(t *testing.T) {
	t.Parallel()
	const set = all + ",openshift.enabled=true,metrics.serviceMonitor.enabled=true,metrics.readers[0].name=p,metrics.readers[0].namespace=m," +
		"gatewayController.passwordSecrets={router-1},controller.federation.enabled=true,controller.federation.machines.clouds[0].name=east"
	before := documents(t, "--set", set)
	after := documents(t, "--set", set+",fullnameOverride=net")
	kinds := map[string]int{}
	names := map[string]string{} // before -> after
	for i := range before {
		was, is := header(t, before[i]), header(t, after[i])
		want := was.Name
		if !fixedName(was.Kind, was.Name) && was.Kind != "" {
			want = "net-" + strings.TrimPrefix(was.Name, "isthmus-")
			kinds[was.Kind]++
		}
		if is.Kind != was.Kind || is.Name != want {
			t.Errorf("%s %s is %s %s, want %s", was.Kind, was.Name, is.Kind, is.Name, want)
		}
		names[was.Kind+" "+was.Name] = want
	}
	for _, kind := range []string{
		"DaemonSet", "Deployment", "Service", "ServiceMonitor", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", "ClusterRole",
		"ClusterRoleBinding", "SecurityContextConstraints", "Pod",
	} {
		if kinds[kind] == 0 {
			t.Errorf("no %s has another name", kind)
		}
	}
	// Each line that differs is a name or one of the three references to one.
	reference := regexp.MustCompile(`^(  name: |roleRef: \{apiGroup: rbac.authorization.k8s.io, kind: \w+, name: |configMap: \{name: |resourceNames: \[)([a-z-]+)[\]}]?$`)
	for i := range before {
		was, is := strings.Split(before[i], "\n"), strings.Split(after[i], "\n")
		if len(was) != len(is) {
			t.Fatalf("another number of lines:\n%s", cmp.Diff(before[i], after[i]))
		}
		for l := range was {
			if was[l] == is[l] {
				continue
			}
			trimmed := strings.TrimPrefix(was[l], "          ")
			trimmed = strings.TrimPrefix(trimmed, "    ")
			if m := reference.FindStringSubmatch(trimmed); m == nil || is[l] != strings.Replace(was[l], "isthmus-", "net-", 1) {
				t.Errorf("line %q is %q", was[l], is[l])
			}
		}
	}
	checkReferences(t, after, slices.Collect(maps.Values(names)))
}

// checkReferences checks that bindings and pods refer to objects that are there.
func checkReferences(t *testing.T, documents, names []string) {
	t.Helper()
	refers := regexp.MustCompile(`(?m)^(?:roleRef: \{apiGroup: rbac.authorization.k8s.io, kind: \w+, name: | +configMap: \{name: )([a-z-]+)\}$`)
	n := 0
	for _, doc := range documents {
		for _, m := range refers.FindAllStringSubmatch(doc, -1) {
			n++
			if !slices.Contains(names, m[1]) {
				t.Errorf("%q refers to an object that the chart does not make", m[0])
			}
		}
	}
	if n < 10 {
		t.Errorf("only %d references were found", n)
	}
}

func header(t *testing.T, doc string) metav1.PartialObjectMetadata {
	t.Helper()
	var o metav1.PartialObjectMetadata
	unmarshal(t, doc, &o)
	return o
}
