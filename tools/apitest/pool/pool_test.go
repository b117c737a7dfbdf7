package pool

import (
	"context"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

const assetsVariable = "KUBEBUILDER_ASSETS"

var cidrs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}

// borrow borrows a server and returns an administrator's client of it.
func borrow(t *testing.T, p *Pool) (*Loan, client.Client) {
	t.Helper()
	loan, err := Borrow(t.Context(), p.Socket(), cidrs)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, v1beta1.Install} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	admin, err := client.New(loan.Config(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return loan, admin
}

// returned waits until the pool has an idle server.
func returned(t *testing.T, p *Pool) {
	t.Helper()
	for range 600 {
		p.mu.Lock()
		n := len(p.idle)
		p.mu.Unlock()
		if n > 0 {
			return
		}
		<-time.After(100 * time.Millisecond)
	}
	t.Fatal("the server did not return to the pool")
}

// verifyPaused verifies that an idle server uses no CPU time, once it had its rest.
func verifyPaused(t *testing.T, p *Pool) {
	t.Helper()
	used := func() time.Duration {
		p.mu.Lock()
		defer p.mu.Unlock()
		api, etcd, err := p.idle[0].CPU()
		if err != nil {
			t.Fatal(err)
		}
		return api + etcd
	}
	<-time.After(restTime + time.Second)
	before := used()
	<-time.After(2 * time.Second)
	if after := used(); after != before {
		t.Errorf("an idle server used %v of CPU time in two seconds", after-before)
	}
}

// A borrower creates objects, forbids all Services and changes what the server began with. The next borrower of the same server
// sees none of it. Meanwhile the server is paused. A server that lacks a kind, or has died, is not lent again.
func TestServerIsAsNew(t *testing.T) {
	if os.Getenv(assetsVariable) == "" || netlab.UnitOnly() {
		netlab.Skip(t, assetsVariable+" does not name a folder with kube-apiserver and etcd")
	}
	ctx := t.Context()
	p, err := Listen(ctx, os.Getenv(assetsVariable))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	loan, admin := borrow(t, p)
	host := loan.Config().Host
	upset(t, admin)
	if err := loan.Close(); err != nil {
		t.Fatal(err)
	}
	returned(t, p)
	verifyPaused(t, p)

	loan, admin = borrow(t, p)
	if loan.Config().Host != host {
		t.Errorf("the second borrower got another server")
	}
	verifyNew(ctx, t, admin)
	if err := loan.Close(); err != nil {
		t.Fatal(err)
	}
	returned(t, p)
	verifyPaused(t, p)

	p.mu.Lock()
	p.idle[0].Stop()
	p.mu.Unlock()
	loan, admin = borrow(t, p)
	second := loan.Config().Host
	if second == host {
		t.Errorf("a dead server was lent")
	}
	verifyNew(ctx, t, admin)
	crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "serviceexports.multicluster.x-k8s.io"}}
	if err := admin.Delete(ctx, crd); err != nil {
		t.Fatal(err)
	}
	var export v1beta1.ServiceExportList
	for range 300 {
		if admin.List(ctx, &export) != nil {
			break
		}
		<-time.After(100 * time.Millisecond)
	}
	if err := loan.Close(); err != nil {
		t.Fatal(err)
	}
	loan, admin = borrow(t, p)
	if loan.Config().Host == second {
		t.Errorf("a server without a kind was lent")
	}
	verifyNew(ctx, t, admin)
	if err := loan.Close(); err != nil {
		t.Error(err)
	}
}

// upset changes the cluster in ways that the next borrower would notice.
func upset(t *testing.T, admin client.Client) {
	t.Helper()
	ctx := t.Context()
	const name = "refuse"
	objects := []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}},
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart"}, Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.7.7", Ports: []corev1.ServicePort{{Port: 80}},
		}},
		&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"services"}},
			}}}},
			Validations: []admissionv1.Validation{{Expression: "false"}},
		}},
		&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		}},
	}
	for _, o := range objects {
		if err := admin.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	refused := func() bool {
		return admin.Create(ctx, newService("default", "other"), client.DryRunAll) != nil
	}
	for range 300 {
		if refused() {
			break
		}
		<-time.After(100 * time.Millisecond)
	}
	if !refused() {
		t.Fatal("the policy refuses nothing")
	}
	var kubernetes corev1.Service
	if err := admin.Get(ctx, client.ObjectKey{Namespace: "default", Name: "kubernetes"}, &kubernetes); err != nil {
		t.Fatal(err)
	}
	kubernetes.Labels["changed"] = "yes"
	if err := admin.Update(ctx, &kubernetes); err != nil {
		t.Fatal(err)
	}
}

func newService(namespace, name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
}

// verifyNew verifies that a borrower sees a cluster that has only what each one begins with, and that works.
func verifyNew(ctx context.Context, t *testing.T, admin client.Client) {
	t.Helper()
	var services corev1.ServiceList
	if err := admin.List(ctx, &services); err != nil {
		t.Fatal(err)
	}
	if len(services.Items) != 1 || services.Items[0].Labels["changed"] != "" {
		t.Errorf("the server has the Services %+v, want only kubernetes, unchanged", services.Items)
	}
	var namespaces corev1.NamespaceList
	if err := admin.List(ctx, &namespaces); err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(namespaces.Items, func(n corev1.Namespace) bool { return n.Name == "shop" }) {
		t.Error("the namespace of the first borrower is there")
	}
	fixed := newService("default", "cart")
	fixed.Spec.ClusterIP = "10.96.7.7" // the Service of the first borrower had it
	if err := admin.Create(ctx, fixed); err != nil {
		t.Error(err)
	}
	export := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cart"}}
	if err := admin.Create(ctx, export); err != nil {
		t.Error(err)
	}
}
