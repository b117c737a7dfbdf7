package fences_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federation "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/fences"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	gateway "github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
)

var server apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

const (
	system = "isthmus-system"
	shop   = "shop" // the tenant's namespace
	broker = "isthmus-broker"

	managedBy      = "app.kubernetes.io/managed-by"
	sliceManagedBy = "endpointslice.kubernetes.io/managed-by"
)

// Users of the testbed.
const (
	tenant     = "jane" // may write everything in her namespace, and hand out rights there
	controller = "system:serviceaccount:isthmus-system:isthmus-controller"
	gatewayCtl = "system:serviceaccount:isthmus-system:isthmus-gateway-controller"
	supervisor = "system:serviceaccount:isthmus-system:federation-a"
	member     = "system:serviceaccount:isthmus-broker:member-b"
	collector  = "system:serviceaccount:kube-system:generic-garbage-collector"
	slicer     = "system:serviceaccount:kube-system:endpointslice-controller"
	operator   = "olga" // a cluster administrator, by RBAC alone
)

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	err := errors.Join(clientgoscheme.AddToScheme(s), isthmus.AddToScheme(s), federation.AddToScheme(s), gateway.AddToScheme(s), about.AddToScheme(s), v1beta1.Install(s))
	if err != nil {
		panic(err)
	}
	return s
}()

// testbed is a member cluster with the policies in force. The accounts have more rights than in reality, so that the policies
// alone refuse.
type testbed struct {
	t     testing.TB
	admin client.Client
}

func newTestbed(t testing.TB) *testbed {
	t.Helper()
	w := &testbed{t: t}
	w.admin = w.as("")
	for _, ns := range []string{system, shop, broker} {
		w.put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
	}
	everything := []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}}
	most := []rbacv1.PolicyRule{{APIGroups: []string{
		"", "discovery.k8s.io", "multicluster.x-k8s.io", "networking.k8s.io", "coordination.k8s.io", "events.k8s.io", "apps", "about.k8s.io",
		"federation.isthmus.dev", "gateway.isthmus.dev", "rbac.authorization.k8s.io", "authentication.k8s.io", "authorization.k8s.io",
	}, Resources: []string{"*"}, Verbs: []string{"*"}}, {APIGroups: []string{"isthmus.dev"}, Resources: []string{"members", "members/status", "nodereports"}, Verbs: []string{"*"}}}
	users := map[string][]rbacv1.PolicyRule{operator: everything}
	for _, u := range []string{controller, gatewayCtl, supervisor, member, collector, slicer} {
		users[u] = most
	}
	for user, rules := range users {
		name := strings.ReplaceAll(user, ":", ".")
		w.put(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules})
		w.put(&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}},
		})
	}
	// The tenant has every right in her namespace, even to use what is reserved; no such right counts.
	w.put(&rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "tenant"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: tenant}},
	})
	w.put(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "members-of-the-broker"}, Rules: []rbacv1.PolicyRule{fences.MayUseReserved(broker)}})
	w.put(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "members-of-the-broker"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "members-of-the-broker"},
		Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: member}},
	})
	policies, err := fences.Policies(system)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range policies {
		w.put(p)
	}
	w.awaitPolicies()
	return w
}

// as returns a client of a user, or of the administrator for "".
func (w *testbed) as(user string) client.Client {
	w.t.Helper()
	config := server.Config(w.t)
	if user != "" {
		config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// put creates an object, which is deleted when the test ends.
func (w *testbed) put(o client.Object) {
	w.t.Helper()
	if err := w.admin.Create(w.t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Fatal(err)
	}
	if _, namespace := o.(*corev1.Namespace); namespace {
		return // nothing empties it here
	}
	w.t.Cleanup(func() {
		if err := w.admin.Delete(context.Background(), o); client.IgnoreNotFound(err) != nil {
			w.t.Error(err)
		}
	})
}

// awaitPolicies waits until the API server enforces all policies.
func (w *testbed) awaitPolicies() {
	w.t.Helper()
	for user, o := range map[string]client.Object{
		tenant:     service("await", labels(isthmus.LabelCluster, "a")),
		controller: configMap("await"),
		gatewayCtl: configMap("await"),
	} {
		await.True(w.t, "the policy around "+user+" is enforced", func() bool {
			return apierrors.IsForbidden(w.as(user).Create(w.t.Context(), o.DeepCopyObject().(client.Object), client.DryRunAll))
		})
	}
}

// option changes an object of a test.
type option func(client.Object)

func labels(pairs ...string) option {
	return func(o client.Object) { o.SetLabels(merged(o.GetLabels(), pairs)) }
}

func annotations(pairs ...string) option {
	return func(o client.Object) { o.SetAnnotations(merged(o.GetAnnotations(), pairs)) }
}

func in(namespace string) option { return func(o client.Object) { o.SetNamespace(namespace) } }

func merged(m map[string]string, pairs []string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	for pair := range slices.Chunk(pairs, 2) {
		m[pair[0]] = pair[1]
	}
	return m
}

func with[T client.Object](o T, name string, options []option) T {
	o.SetNamespace(shop)
	o.SetName(name)
	for _, option := range options {
		option(o)
	}
	return o
}

func service(name string, options ...option) *corev1.Service {
	return with(&corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, name, options)
}

func balancer(name string, options ...option) *corev1.Service {
	s := service(name, options...)
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	return s
}

func slice(name string, options ...option) *discoveryv1.EndpointSlice {
	return with(&discoveryv1.EndpointSlice{
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}}},
	}, name, options)
}

func serviceImport(name string, options ...option) *v1beta1.ServiceImport {
	return with(&v1beta1.ServiceImport{Spec: v1beta1.ServiceImportSpec{
		Type: v1beta1.ClusterSetIP, IPs: []string{"243.0.0.1"}, Ports: []v1beta1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
	}}, name, options)
}

func export(name string, options ...option) *v1beta1.ServiceExport {
	return with(&v1beta1.ServiceExport{}, name, options)
}

func endpoints(name string, options ...option) *corev1.Endpoints { //nolint:staticcheck // Kubernetes copies its labels to slices
	return with(&corev1.Endpoints{}, name, options) //nolint:staticcheck // see above
}

func networkPolicy(name string, options ...option) *networkingv1.NetworkPolicy {
	return with(&networkingv1.NetworkPolicy{}, name, options)
}

func configMap(name string, options ...option) *corev1.ConfigMap {
	return with(&corev1.ConfigMap{}, name, options)
}

// attempt is a request of a user.
type attempt func(context.Context, client.Client) error

func create(o client.Object) attempt {
	return func(ctx context.Context, c client.Client) error { return c.Create(ctx, o, client.DryRunAll) }
}

func remove(o client.Object) attempt {
	return func(ctx context.Context, c client.Client) error { return c.Delete(ctx, o, client.DryRunAll) }
}

func removeAll(o client.Object) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.DeleteAllOf(ctx, o, client.InNamespace(shop), client.DryRunAll)
	}
}

func merge(o client.Object, patch string) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Patch(ctx, o.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(patch)), client.DryRunAll) //nolint:forcetypeassert // a copy has its type
	}
}

func mergeStatus(o client.Object, patch string) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Status().Patch(ctx, o.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(patch)), client.DryRunAll) //nolint:forcetypeassert // a copy has its type
	}
}

func apply(o client.Object) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Patch(ctx, o, client.Apply, client.FieldOwner("someone"), client.ForceOwnership, client.DryRunAll) //nolint:staticcheck // of a typed object
	}
}

// attack is an attempt that must be refused.
type attack struct {
	as      string
	do      attempt
	because string // part of the answer
}

// refused returns an error unless err is a refusal for a reason.
func refused(err error, because string) error {
	switch {
	case err == nil:
		return errors.New("it is accepted")
	case !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), because):
		return fmt.Errorf("it fails with %w; want a refusal with %q", err, because)
	}
	return nil
}

// run makes all attempts, by a user unless they name another. Each must be refused.
func (w *testbed) run(t *testing.T, attacks map[string]attack, by string) {
	t.Helper()
	clients := map[string]client.Client{}
	for name, a := range attacks {
		if a.as == "" {
			a.as = by
		}
		if clients[a.as] == nil {
			clients[a.as] = w.as(a.as)
		}
		t.Run(name, func(t *testing.T) {
			if err := refused(a.do(t.Context(), clients[a.as]), a.because); err != nil {
				t.Error(err)
			}
		})
	}
	t.Logf("%d attempts", len(attacks))
}

// permitted is an attempt that must succeed.
type permitted struct {
	as string
	do attempt
}

func (w *testbed) permit(t *testing.T, all map[string]permitted) {
	t.Helper()
	for name, p := range all {
		t.Run(name, func(t *testing.T) {
			if err := p.do(t.Context(), w.as(p.as)); err != nil {
				t.Error(err)
			}
		})
	}
}

// A namespace that is none, and rights that the policies name.
func TestPolicies(t *testing.T) {
	if _, err := fences.Policies("No Namespace"); err == nil {
		t.Error("a bad namespace is accepted")
	}
	all, err := fences.Policies("elsewhere")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range all {
		names = append(names, o.GetName())
		text, err := yaml.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), fences.Placeholder) || strings.Contains(string(text), "isthmus-system") {
			t.Errorf("%s names another namespace", o.GetName())
		}
	}
	slices.Sort(names)
	if want := []string{fences.ControllerName, fences.GatewayControllerName, fences.ReservedName}; !slices.Equal(slices.Compact(names), want) || len(all) != 6 {
		t.Errorf("policies %v, want %v and their bindings", names, want)
	}
}

// The roles of our accounts read no Secret. The controller may patch that with its token for the broker, and nothing else.
func TestRolesReadNoSecrets(t *testing.T) {
	roles, err := filepath.Glob("../../../deploy/helm/isthmus/files/*-role.yaml")
	if err != nil || len(roles) < 4 {
		t.Fatalf("roles %v, %v", roles, err)
	}
	for _, path := range roles {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for document := range strings.SplitSeq(string(text), "\n---\n") {
			var role rbacv1.ClusterRole
			if err := yaml.Unmarshal([]byte(document), &role); err != nil {
				t.Fatal(err)
			}
			for _, rule := range role.Rules {
				token := slices.Equal(rule.Resources, []string{"secrets"}) && slices.Equal(rule.Verbs, []string{"patch"}) && slices.Equal(rule.ResourceNames, []string{"isthmus-broker"})
				if token && role.Kind == "Role" && role.Name == "isthmus-controller" {
					continue
				}
				if slices.Contains(rule.Resources, "secrets") || slices.Contains(rule.Resources, "*") {
					t.Errorf("%s: %s %s may %v %v", filepath.Base(path), role.Kind, role.Name, rule.Verbs, rule.Resources)
				}
			}
		}
	}
}

// asToken is a request for a token.
func asToken() *authenticationv1.TokenRequest { return &authenticationv1.TokenRequest{} }

// The API server counts refusals by policy, under the name and the labels of the query in docs/security.md.
func TestRefusalsAreCounted(t *testing.T) {
	newTestbed(t) // each of the three policies has refused a request
	config := server.Config(t)
	http, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.Get(config.Host + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	query := regexp.MustCompile(`(apiserver_\w+)\{policy=~"([^"]*)", (enforcement_action="\w+")\}`).FindSubmatch(page)
	if query == nil {
		t.Fatal("docs/security.md has no query for refusals")
	}
	names := regexp.MustCompile("^(?:" + string(query[2]) + ")$")
	counted := map[string]bool{}
	for _, line := range regexp.MustCompile(string(query[1])+`\{`+string(query[3])+`,[^\n]*policy="([^"]*)"[^\n]*\} [1-9]`).FindAllSubmatch(text, -1) {
		if names.Match(line[1]) {
			counted[string(line[1])] = true
		}
	}
	for _, want := range []string{fences.ReservedName, fences.ControllerName, fences.GatewayControllerName} {
		if !counted[want] {
			t.Errorf("no refusal of %s is counted: %v", want, counted)
		}
	}
}
