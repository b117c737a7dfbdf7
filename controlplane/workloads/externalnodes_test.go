package workloads_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// externalNodeKind is the kind of Antrea.
var externalNodeKind = schema.GroupVersionKind{Group: "crd.antrea.io", Version: "v1alpha1", Kind: "ExternalNode"}

// installAntrea defines ExternalNode with the rules of Antrea's own definition: one interface with at least one address.
func installAntrea(t *testing.T) {
	t.Helper()
	one := int64(1)
	text := apiextensionsv1.JSONSchemaProps{Type: "string"}
	ip := apiextensionsv1.JSONSchemaProps{Type: "string", OneOf: []apiextensionsv1.JSONSchemaProps{{Format: "ipv4"}, {Format: "ipv6"}}}
	object := func(required string, properties map[string]apiextensionsv1.JSONSchemaProps) apiextensionsv1.JSONSchemaProps {
		return apiextensionsv1.JSONSchemaProps{Type: "object", Required: []string{required}, Properties: properties}
	}
	array := func(items apiextensionsv1.JSONSchemaProps, most *int64) apiextensionsv1.JSONSchemaProps {
		return apiextensionsv1.JSONSchemaProps{Type: "array", MinItems: &one, MaxItems: most, Items: &apiextensionsv1.JSONSchemaPropsOrArray{Schema: &items}}
	}
	iface := object("ips", map[string]apiextensionsv1.JSONSchemaProps{"ips": array(ip, nil), "name": text})
	whole := object("spec", map[string]apiextensionsv1.JSONSchemaProps{
		"spec": object("interfaces", map[string]apiextensionsv1.JSONSchemaProps{"interfaces": array(iface, &one)}),
	})
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "externalnodes.crd.antrea.io"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: externalNodeKind.Group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "externalnodes", Singular: "externalnode", Kind: "ExternalNode", ListKind: "ExternalNodeList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1alpha1", Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &whole},
			}},
		},
	}
	if _, err := envtest.InstallCRDs(server.Config(t), envtest.CRDInstallOptions{CRDs: []*apiextensionsv1.CustomResourceDefinition{crd}}); err != nil {
		t.Fatal(err)
	}
}

// nodesOf returns the ExternalNodes of the namespace, sorted: NAME ADDRESS,ADDRESS and a label.
func (w *testbed) nodesOf(label string) (all []string) {
	w.t.Helper()
	for _, o := range w.listNodes() {
		interfaces, _, err := unstructured.NestedSlice(o.Object, "spec", "interfaces")
		if err != nil || len(interfaces) != 1 {
			w.t.Fatalf("%v: %v", o.Object, err)
		}
		ips := interfaces[0].(map[string]any)["ips"]
		all = append(all, strings.TrimSpace(fmt.Sprintf("%s %v %s", o.GetName(), ips, o.GetLabels()[label])))
	}
	slices.Sort(all)
	return all
}

// awaitNodes waits for the result of nodesOf.
func (w *testbed) awaitNodes(label string, want ...string) {
	w.t.Helper()
	await.True(w.t, fmt.Sprintf("the ExternalNodes %q", want), func() bool { return slices.Equal(w.nodesOf(label), want) })
}

// Servers and ExternalWorkloads with addresses have ExternalNodes with their labels, and their names or else their IDs. Those of users
// stay as they are. A silent cloud removes none. A cluster without Antrea says so until it is installed.
func TestExternalNodes(t *testing.T) {
	w := newTestbed(t)
	w.nodes = true
	early, stop := w.run()
	await.True(t, "Antrea is missing", func() bool {
		return strings.Contains(strings.Join(w.problems(early), "\n"), "install Antrea, or remove the setting")
	})
	installAntrea(t)
	await.True(t, "Antrea is there", func() bool { return len(w.problems(early)) == 0 })
	stop()
	w.create(externalNode("db-2"))
	named := vm("2", "10.9.0.2", "app=db")
	named.Name = "not a host name"
	w.cloud.servers = []workloads.Resource{vm("1", "10.9.0.1", "app=db", "federation.isthmus.dev/cloud=west"), named, vm("3", ""), vm("4", "10.9.0.4")}
	w.cloud.servers[3].Name = "name-1" // that of the first one
	one, two := workload("db-1", "10.9.1.1", "2001:db8::1"), workload("db-2", "10.9.1.2")
	one.Labels = map[string]string{"app": "sql"}
	w.create(one)
	w.create(two)
	v, stop := w.run()
	w.awaitNodes("app", "db-1 [10.9.1.1 2001:db8::1] sql", "db-2 [192.0.2.1]", "name-1 [10.9.0.1] db", "vm-2 [10.9.0.2] db")
	if have := w.nodesOf("federation.isthmus.dev/cloud"); have[2] != "name-1 [10.9.0.1] east" {
		t.Errorf("%q", have)
	}
	await.True(t, "the problems of two names", func() bool {
		all := strings.Join(w.problems(v), "\n")
		return strings.Contains(all, "db-2 is not ours and stays unchanged") && strings.Contains(all, "name-1 is that of server name-1 (1) of cloud east")
	})
	w.cloud.set(t, func(c *cloud) { c.servers[0].Labels["app"] = "web" })
	w.awaitNodes("app", "db-1 [10.9.1.1 2001:db8::1] sql", "db-2 [192.0.2.1]", "name-1 [10.9.0.1] web", "vm-2 [10.9.0.2] db")
	before := w.nodeVersions()
	stop()
	w.cloud.silent = true
	w.run()
	if err := w.Delete(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	w.awaitNodes("app", "db-2 [192.0.2.1]", "name-1 [10.9.0.1] web", "vm-2 [10.9.0.2] db")
	if diff := cmp.Diff(before["name-1"], w.nodeVersions()["name-1"]); diff != "" {
		t.Error(diff)
	}
	w.cloud.set(t, func(c *cloud) { c.silent, c.servers = false, nil })
	w.awaitNodes("app", "db-2 [192.0.2.1]")
	w.refusesForeignNodes()
	conformance.Holds(t, "F29")
}

// refusesForeignNodes checks that a stolen token of the controller writes no other ExternalNodes than those of machines.
func (w *testbed) refusesForeignNodes() {
	w.t.Helper()
	local := server.Config(w.t)
	local.Impersonate.UserName = account
	stolen, err := client.New(local, client.Options{})
	if err != nil {
		w.t.Fatal(err)
	}
	for namespace, because := range map[string]string{w.namespace: "writes only ExternalNodes with the label", metav1.NamespaceSystem: "makes no Services of machines in namespaces kube-*, and no ExternalNodes"} {
		o := externalNode("evil")
		o.SetNamespace(namespace)
		if namespace == metav1.NamespaceSystem {
			o.SetLabels(map[string]string{isthmus.LabelManagedBy: v1alpha1.ManagedByMachines})
		}
		if err := stolen.Create(w.t.Context(), o); err == nil || !strings.Contains(err.Error(), because) {
			w.t.Errorf("in %s: %v; want %q", namespace, err, because)
		}
	}
}

// externalNode returns an ExternalNode.
func externalNode(name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(externalNodeKind)
	o.SetName(name)
	o.Object["spec"] = map[string]any{"interfaces": []any{map[string]any{"ips": []any{"192.0.2.1"}}}}
	return o
}

// nodeVersions returns the resource versions of the ExternalNodes by name.
func (w *testbed) nodeVersions() map[string]string {
	w.t.Helper()
	all := map[string]string{}
	for _, o := range w.listNodes() {
		all[o.GetName()] = o.GetResourceVersion()
	}
	return all
}

// listNodes returns the ExternalNodes of the namespace.
func (w *testbed) listNodes() []unstructured.Unstructured {
	w.t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(externalNodeKind.GroupVersion().WithKind("ExternalNodeList"))
	if err := w.List(w.t.Context(), list, client.InNamespace(w.namespace)); err != nil {
		w.t.Fatal(err)
	}
	return list.Items
}
