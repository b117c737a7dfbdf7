package admission_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/tools/await"
)

const supervisor = "system:serviceaccount:isthmus-system:federation-a"

// testbed is a member with the policies Own and VIPs, or others, whose Federation has one range of each family.
type testbed struct {
	t             *testing.T
	admin, leader client.Client
}

func newTestbed(t *testing.T, policies ...client.Object) *testbed {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		authenticationv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, v1beta1.Install, federationv1alpha1.AddToScheme, admissionv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	config := server.Config(t)
	w := &testbed{t: t}
	var err, err2 error
	w.admin, err = client.New(config, client.Options{Scheme: scheme})
	config.Impersonate = rest.ImpersonationConfig{UserName: supervisor}
	w.leader, err2 = client.New(config, client.Options{Scheme: scheme})
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	w.put(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "supervisor"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: supervisor}},
	})
	for _, p := range policies {
		w.put(p)
	}
	return w
}

// put creates an object, which is deleted when the test ends.
func (w *testbed) put(o client.Object) {
	w.t.Helper()
	if err := w.admin.Create(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := w.admin.Delete(context.Background(), o); client.IgnoreNotFound(err) != nil {
			w.t.Error(err)
		}
	})
}

// try creates o as the supervisor, and changes nothing.
func (w *testbed) try(o client.Object) error {
	return w.leader.Create(w.t.Context(), o.DeepCopyObject().(client.Object), client.DryRunAll) //nolint:forcetypeassert // a copy has its type
}

// await waits until try refuses o, because a policy holds.
func (w *testbed) await(o client.Object, refused bool) {
	w.t.Helper()
	await.NoError(w.t, fmt.Sprintf("it is refused: %v", refused), func() error {
		err := w.try(o)
		if !refused {
			return err
		}
		if !apierrors.IsForbidden(err) {
			return fmt.Errorf("no refusal: %w", err)
		}
		return nil
	})
}

func ours(key string) map[string]string { return map[string]string{key: federationv1alpha1.ManagedBy} }

func service(namespace string, edit func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "shop", Labels: ours("app.kubernetes.io/managed-by")},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if edit != nil {
		edit(s)
	}
	return s
}

func slice(namespace string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: "shop", Labels: ours(discoveryv1.LabelManagedBy)},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}}},
	}
}

func imported(namespace string, ips ...string) *v1beta1.ServiceImport {
	return &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "shop", Labels: ours("app.kubernetes.io/managed-by")},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: ips, Ports: []v1beta1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}},
	}
}

func withRanges(ranges ...string) *federationv1alpha1.Federation {
	return &federationv1alpha1.Federation{
		ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName},
		Spec: federationv1alpha1.FederationSpec{
			ClusterSet: "green", ClusterSetIP: federationv1alpha1.ClusterSetIPSpec{Enabled: len(ranges) > 0, Ranges: ranges},
		},
	}
}

// A thief of a supervisor's token takes no traffic that is not the federation's: neither by a Service, nor by a ClusterSetIP.
func TestStolenSupervisor(t *testing.T) {
	w := newTestbed(t, slices.Concat(admission.Own("isthmus-system"), admission.VIPs("isthmus-system"))...)
	federation := withRanges("243.0.0.0/24", "fd00:243::/120")
	w.put(federation)
	w.await(service("kube-system", nil), true)
	w.await(imported("default", "8.8.8.8"), true)
	external := func(ip string) client.Object {
		return service("default", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{ip} })
	}
	of := func(kind corev1.ServiceType) client.Object {
		return service("default", func(s *corev1.Service) { s.Spec.Type = kind })
	}
	const addresses = "spec.clusterSetIP.ranges of this cluster's Federation is [243.0.0.0/24 fd00:243::/120]"
	for name, tc := range map[string]struct {
		try     client.Object
		because string
	}{
		"externalIPs":              {external("192.0.2.1"), "without externalIPs"},
		"the API server's address": {external("10.96.0.1"), "without externalIPs"},
		"a load balancer":          {of(corev1.ServiceTypeLoadBalancer), "only Services of type ClusterIP"},
		"a node port":              {of(corev1.ServiceTypeNodePort), "only Services of type ClusterIP"},
		"an external name": {service("default", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "evil.example.org"
		}), "only Services of type ClusterIP"},
		"a selector":               {service("default", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "evil"} }), "without a selector"},
		"a Service in kube-system": {service("kube-system", nil), "may not write services in kube-system"},
		"a slice in kube-system":   {slice("kube-system"), "may not write endpointslices in kube-system"},
		"an import in kube-public": {imported("kube-public", "243.0.0.1"), "may not write serviceimports in kube-public"},
		"a policy in kube-system": {&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{
			Namespace: "kube-system", Name: "allow", Labels: ours("app.kubernetes.io/managed-by"),
		}}, "may not write networkpolicies in kube-system"},
		"the API server's import":    {imported("default", "10.96.0.1"), addresses},
		"a public address":           {imported("default", "8.8.8.8"), addresses},
		"one address of two":         {imported("default", "243.0.0.1", "8.8.8.8"), addresses},
		"the address behind":         {imported("default", "243.0.1.0"), addresses},
		"the address before":         {imported("default", "242.255.255.255"), addresses},
		"an IPv6 address":            {imported("default", "2001:db8::1"), addresses},
		"an address within another":  {imported("default", "::ffff:8.8.8.8"), ""},
		"no address":                 {imported("default", "shop.example.org"), ""},
		"an import of another owner": {func() client.Object { o := imported("default", "243.0.0.1"); o.Labels = nil; return o }(), "a supervisor may write objects with the label"},
	} {
		t.Run(name, func(t *testing.T) {
			err := w.try(tc.try)
			if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) || !strings.Contains(fmt.Sprint(err), tc.because) {
				t.Errorf("%v, want it refused because %q", err, tc.because)
			}
		})
	}
	for name, o := range map[string]client.Object{
		"a Service": service("default", nil), "a slice": slice("default"), "an import": imported("default", "243.0.0.9", "fd00:243::9"),
		"an import without an address": imported("default"),
	} {
		if err := w.try(o); err != nil {
			t.Errorf("%s is refused: %v", name, err)
		}
	}
	// An address of a Service that a user changed can go again: the leader first writes its epoch.
	changed := service("default", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1"} })
	w.put(changed)
	noted := changed.DeepCopy()
	noted.Annotations = map[string]string{federationv1alpha1.AnnotationEpoch: "9"}
	if err := w.leader.Update(t.Context(), noted, client.DryRunAll); err != nil {
		t.Errorf("an epoch is refused: %v", err)
	}
	if err := w.leader.Delete(t.Context(), changed.DeepCopy(), client.DryRunAll); err != nil {
		t.Errorf("a deletion is refused: %v", err)
	}
}

// A thief of a supervisor's token adds no endpoints to a Service of a user, whatever labels its slices have.
func TestStolenSupervisorAddsNoEndpoints(t *testing.T) {
	w := newTestbed(t, slices.Concat(admission.Own("isthmus-system"), admission.Endpoints("isthmus-system"))...)
	theirs := service("default", func(s *corev1.Service) { s.Name, s.Labels = "theirs", map[string]string{"app": "theirs"} })
	elsewhere := service("kube-public", func(s *corev1.Service) { s.Name, s.Labels = "elsewhere", nil })
	fed := service("default", nil)
	for _, o := range []client.Object{theirs, elsewhere, fed} {
		w.put(o)
	}
	of := func(name string, edit func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
		es := slice("default")
		es.Labels[discoveryv1.LabelServiceName] = name
		if edit != nil {
			edit(es)
		}
		return es
	}
	w.await(of("theirs", nil), true)
	ofOurs := of("shop", func(es *discoveryv1.EndpointSlice) { es.Name = "shop-of-a" })
	w.put(ofOurs)
	moved := ofOurs.DeepCopy()
	moved.Labels[discoveryv1.LabelServiceName] = "theirs"
	for name, tc := range map[string]struct {
		err     error
		because string
	}{
		"a slice of a user's Service": {w.try(of("theirs", nil)), "Service default/theirs is not the federation's"},
		"a slice that becomes one":    {w.leader.Update(t.Context(), moved, client.DryRunAll), "Service default/theirs is not the federation's"},
		"one without the slices' mark": {w.try(of("theirs", func(es *discoveryv1.EndpointSlice) {
			delete(es.Labels, discoveryv1.LabelManagedBy)
			es.Labels["app.kubernetes.io/managed-by"] = federationv1alpha1.ManagedBy
		})), "a supervisor's EndpointSlices have the label"},
	} {
		if !apierrors.IsForbidden(tc.err) || !strings.Contains(tc.err.Error(), tc.because) {
			t.Errorf("%s: %v, want it refused because %q", name, tc.err, tc.because)
		}
	}
	for name, o := range map[string]client.Object{
		"a slice of a federated Service": of("shop", nil), "one of no Service": of("future", nil), "one of a name in another namespace": of("elsewhere", nil),
	} {
		if err := w.try(o); err != nil {
			t.Errorf("%s is refused: %v", name, err)
		}
	}
	if err := w.admin.Delete(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	w.await(of("theirs", nil), false) // the name is free
}

// Without ranges in the member's Federation no address is accepted, whatever the supervisor's has.
func TestFederationWithoutRanges(t *testing.T) {
	w := newTestbed(t, admission.VIPs("isthmus-system")...)
	w.put(withRanges())
	w.await(imported("default", "243.0.0.1"), true)
	if err := w.try(imported("default", "243.0.0.1")); !strings.Contains(fmt.Sprint(err), "run isthmusctl federation create again") {
		t.Errorf("%v does not name the remedy", err)
	}
	if err := w.try(imported("default")); err != nil {
		t.Errorf("an import without an address is refused: %v", err)
	}
}

// An API server that cannot compare addresses accepts none.
func TestNoVIPs(t *testing.T) {
	w := newTestbed(t, admission.NoVIPs("isthmus-system")...)
	w.put(withRanges("243.0.0.0/24"))
	w.await(imported("default", "243.0.0.1"), true)
	if err := w.try(imported("default")); err != nil {
		t.Errorf("an import without an address is refused: %v", err)
	}
}

// The policy alone, without the limits of RBAC, lets a supervisor request only its own bound tokens, and delete only Secrets with its own
// tokens that do not expire.
func TestTokens(t *testing.T) {
	const namespace = "isthmus-system"
	w := newTestbed(t, slices.Concat(admission.Own(namespace), admission.Tokens(namespace))...)
	secret := func(namespace, name string, kind corev1.SecretType, account string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: map[string]string{corev1.ServiceAccountNameKey: account}}, Type: kind}
	}
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "federation-a"}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "federation-b"}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "federation-a"}},
		secret(namespace, "bound", corev1.SecretTypeOpaque, ""),
		secret(namespace, "own", corev1.SecretTypeServiceAccountToken, "federation-a"),
		secret(namespace, "of-b", corev1.SecretTypeServiceAccountToken, "federation-b"),
		secret(namespace, "posing", corev1.SecretTypeOpaque, "federation-a"),
		secret("default", "elsewhere", corev1.SecretTypeServiceAccountToken, "federation-a"),
	} {
		w.put(o)
	}
	request := func(namespace, account, kind string, lifetime time.Duration) error {
		r := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(int64(lifetime / time.Second))}}
		if kind != "" {
			r.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: kind, APIVersion: "v1", Name: "bound"}
		}
		return w.leader.SubResource("token").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}, r)
	}
	remove := func(namespace, name string) error {
		return w.leader.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}, client.DryRunAll)
	}
	w.await(service("default", func(s *corev1.Service) { s.Labels = nil }), true)
	await.True(t, "the policy is in effect", func() bool {
		return apierrors.IsForbidden(request(namespace, "federation-b", "Secret", time.Hour))
	})
	week := federationv1alpha1.TokenLifetime
	for name, tc := range map[string]struct {
		err     error
		because string // "" means that it is allowed
	}{
		"its token":                    {request(namespace, "federation-a", "Secret", week), ""},
		"a longer one":                 {request(namespace, "federation-a", "Secret", week+time.Second), "lives for at most 604800 seconds"},
		"an unbound one":               {request(namespace, "federation-a", "", time.Hour), "the token is bound to /"},
		"one bound to a pod":           {request(namespace, "federation-a", "Pod", time.Hour), "the token is bound to Pod/bound"},
		"one of another supervisor":    {request(namespace, "federation-b", "Secret", time.Hour), "may not request a token of isthmus-system/federation-b"},
		"one of a namesake":            {request("default", "federation-a", "Secret", time.Hour), "may not request a token of default/federation-a"},
		"its former token":             {remove(namespace, "own"), ""},
		"another supervisor's, gone":   {remove(namespace, "of-b"), "deletes only Secrets with its own tokens"},
		"another kind of Secret, gone": {remove(namespace, "posing"), "deletes only Secrets with its own tokens"},
		"a namesake's, gone":           {remove("default", "elsewhere"), "deletes only Secrets with its own tokens"},
	} {
		switch {
		case tc.because == "" && tc.err != nil:
			t.Errorf("%s: %v", name, tc.err)
		case tc.because != "" && (!apierrors.IsForbidden(tc.err) || !strings.Contains(tc.err.Error(), tc.because)):
			t.Errorf("%s: %v, want %q", name, tc.err, tc.because)
		}
	}
}
