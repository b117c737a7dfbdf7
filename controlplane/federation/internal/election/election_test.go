package election_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/election"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
)

var server apitest.Server

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

const (
	namespace = "isthmus-system"
	memberID  = clusterset.ClusterID("east")
)

var times = election.Times{Lease: 5 * time.Second, Renew: 4 * time.Second, Retry: 200 * time.Millisecond}

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, rbacv1.AddToScheme, admissionv1.AddToScheme, coordinationv1.AddToScheme, networkingv1.AddToScheme, federationv1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// as returns the configuration of a supervisor's account with all rights; only the fence limits it.
func as(config *rest.Config, supervisor clusterset.ClusterID) *rest.Config {
	config = rest.CopyConfig(config)
	config.Impersonate.UserName = "system:serviceaccount:" + namespace + ":" + federationv1alpha1.SupervisorAccount(supervisor)
	config.Impersonate.Groups = []string{"system:masters"}
	return config
}

// term is one leadership, as passed to work.
type term struct {
	ctx context.Context //nolint:containedctx // its end is what tests wait for
	fenced.Term
}

// run makes a supervisor take part in the election until the test ends, and returns the terms that it wins.
func run(t *testing.T, config *rest.Config, identity string) <-chan term {
	t.Helper()
	leases, err := coordinationv1client.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	won := make(chan term)
	ctx, cancel := context.WithCancel(t.Context())
	candidate := election.New(leases, types.NamespacedName{Namespace: namespace, Name: string(memberID)}, identity, times)
	var running sync.WaitGroup
	running.Go(func() {
		err := candidate.Run(ctx, func(leading context.Context, is fenced.Term) {
			select {
			case won <- term{leading, is}:
			case <-ctx.Done():
			}
			<-leading.Done()
		})
		if err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return won
}

func receive[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(time.Minute):
		t.Fatalf("waited a minute for: %s", what)
		panic("unreachable")
	}
}

// ours is the label of the objects of leaders.
var ours = map[string]string{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}

// anybody is a reconcile.Member with only an id.
type anybody struct{ reconcile.Member }

func (anybody) ID() clusterset.ClusterID { return memberID }

// The leader of a member is cut off, another one wins, and the writes of the former leader arrive late. None of them
// succeeds, and the objects of the new leader stay.
func TestFormerLeaderIsFenced(t *testing.T) {
	ctx := t.Context()
	admin := newClient(t, server.Config(t))
	objects := slices.Concat([]client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}}, admission.Fence(namespace, memberID), admission.Own(namespace))
	for _, obj := range objects {
		if err := admin.Create(ctx, obj); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, obj := range admission.Fence(namespace, memberID) {
			if err := admin.Delete(context.WithoutCancel(ctx), obj); err != nil {
				t.Error(err)
			}
		}
	})
	gate, cut := apitest.NewGate(t, as(server.Config(t), "a"))
	first := receive(t, "a leads", run(t, cut, "a/pod"))
	asA, asB := newClient(t, as(server.Config(t), "a")), newClient(t, as(server.Config(t), "b"))
	object := func(name string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: ours}}
	}
	old := fenced.New(anybody{}, first.Term, asA, nil)
	await.True(t, "the fence is up and lets the leader write", func() bool {
		return apierrors.IsForbidden(fenced.New(anybody{}, first.Term, asB, nil).Create(ctx, object("b-too-early"))) && old.Create(ctx, object("mine")) == nil
	})

	kept := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kept", Labels: ours}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	if err := old.Create(ctx, kept); err != nil {
		t.Fatal(err)
	}

	won := run(t, as(server.Config(t), "b"), "b/pod")
	gate.Shut()
	receive(t, "a knows that it leads no more", first.ctx.Done())
	second := receive(t, "b leads", won)
	if first.Held() || !second.Held() || second.Epoch <= first.Epoch {
		t.Fatalf("a holds it: %v, b: %v; epochs %d, then %d", first.Held(), second.Held(), first.Epoch, second.Epoch)
	}
	if err := old.Create(ctx, object("late")); !errors.Is(err, reconcile.ErrNotLeader) {
		t.Errorf("a writes after it knows: %v", err)
	}

	mine := object("mine")
	next := fenced.New(anybody{}, second.Term, asB, nil)
	await.True(t, "b writes", func() bool {
		return next.Annotate(ctx, mine, map[string]string{"example.org/by": "b"}) == nil
	})
	if err := admin.Get(ctx, client.ObjectKeyFromObject(mine), mine); err != nil {
		t.Fatal(err)
	}
	// Writes of a process that was suspended between its last check of the clock and the write.
	frozen := fenced.New(anybody{}, fenced.Term{Epoch: first.Epoch}, asA, nil)
	// The same of a process that shares the account with the one that leads now.
	sibling := fenced.New(anybody{}, fenced.Term{Epoch: first.Epoch}, asB, nil)
	for name, late := range map[string]reconcile.Writer{"another supervisor": frozen, "the same supervisor": sibling} {
		for verb, err := range map[string]error{
			"create":   late.Create(ctx, object("late")),
			"apply":    late.Apply(ctx, object("mine")),
			"replace":  late.Replace(ctx, mine.DeepCopy()),
			"annotate": late.Annotate(ctx, mine, map[string]string{"example.org/by": "a"}),
		} {
			if !apierrors.IsForbidden(err) {
				t.Errorf("%s: a late %s: %v, want it refused", name, verb, err)
			}
		}
	}
	// The former leader can neither delete an object that it reads now nor write its status, also if the new leader left the
	// object unchanged.
	if err := frozen.Delete(ctx, mine.DeepCopy()); !apierrors.IsForbidden(err) {
		t.Errorf("a late delete: %v, want it refused", err)
	}
	status := func(s *corev1.Service) *corev1.Service {
		told := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, ResourceVersion: s.ResourceVersion}}
		told.Status.Conditions = []metav1.Condition{{Type: "Told", Status: metav1.ConditionTrue, Reason: "Told", LastTransitionTime: metav1.Now()}}
		return told
	}
	left := kept.DeepCopy()
	for name, late := range map[string]reconcile.Writer{"another supervisor": frozen, "the same supervisor": sibling} {
		for verb, err := range map[string]error{"delete": late.Delete(ctx, left.DeepCopy()), "status": late.ApplyStatus(ctx, status(left))} {
			if !apierrors.IsForbidden(err) {
				t.Errorf("%s: a late %s of what was left alone: %v, want it refused", name, verb, err)
			}
		}
	}
	if err := next.ApplyStatus(ctx, status(left)); err != nil {
		t.Errorf("the leader tells: %v", err)
	}
	if err := sibling.Delete(ctx, left); !apierrors.IsConflict(err) {
		t.Errorf("a late delete of what has changed: %v, want a conflict", err)
	}
	if err := admin.Get(ctx, client.ObjectKeyFromObject(kept), kept); err != nil || len(kept.Status.Conditions) != 1 {
		t.Errorf("what the leader told is not there: %v (%v)", kept.Status, err)
	}
	if err := next.Delete(ctx, kept); err != nil {
		t.Errorf("the leader deletes: %v", err)
	}
	after := object("mine")
	if err := admin.Get(ctx, client.ObjectKeyFromObject(mine), after); err != nil || after.ResourceVersion != mine.ResourceVersion {
		t.Errorf("resourceVersion %s became %s (%v)", mine.ResourceVersion, after.ResourceVersion, err)
	}
}

// A cluster leaves a federation in which a led it in epoch 3, and joins again; now b leads it in epoch 0. The fence accepts b's
// writes and rejects those of a.
func TestFenceFollowsLeasesAgain(t *testing.T) {
	ctx := t.Context()
	config := apitest.StartEmpty(t)
	admin, asA, asB := newClient(t, config), newClient(t, as(config, "a")), newClient(t, as(config, "b"))
	create := func(objects ...client.Object) {
		t.Helper()
		for _, obj := range objects {
			if err := admin.Create(ctx, obj); err != nil {
				t.Fatal(err)
			}
		}
	}
	lease := func(holder string, epoch int32) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: string(memberID)}, Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, LeaseTransitions: &epoch,
		}}
	}
	writes := func(c client.Client, epoch string) error {
		return c.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", GenerateName: "written-", Labels: ours, Annotations: map[string]string{federationv1alpha1.AnnotationEpoch: epoch},
		}})
	}
	create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, lease("a/pod", 3))
	create(admission.Parameters()...)
	create(admission.Fence(namespace, memberID)...)
	await.True(t, "the fence accepts a alone", func() bool { return apierrors.IsForbidden(writes(asB, "3")) && writes(asA, "3") == nil })

	for _, obj := range append(admission.Fence(namespace, memberID), lease("", 0)) {
		if err := admin.Delete(ctx, obj); err != nil {
			t.Fatal(err)
		}
	}
	await.True(t, "there is no fence", func() bool { return writes(asB, "3") == nil })
	<-time.After(3 * time.Second) // in which the API server looks for policies

	create(lease("b/pod", 0))
	create(admission.Fence(namespace, memberID)...)
	await.True(t, "the fence accepts b alone", func() bool { return apierrors.IsForbidden(writes(asA, "3")) && writes(asB, "0") == nil })
}

// After the Lease of a leader is deleted, the next epoch of the process is still a later one.
func TestEpochIsNeverReused(t *testing.T) {
	ctx := t.Context()
	admin := newClient(t, server.Config(t))
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "east"}}
	leases, err := coordinationv1client.NewForConfig(server.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	candidate := election.New(leases, client.ObjectKeyFromObject(lease), "a/pod", times)
	work, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		_ = candidate.Run(work, func(leading context.Context, _ fenced.Term) { <-leading.Done() })
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	held := func() bool { holder, _ := candidate.Seen(); return holder == "a/pod" }
	await.True(t, "a leads", held)
	if err := admin.Delete(ctx, lease); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the Lease is there again, of a later epoch", func() bool {
		again := &coordinationv1.Lease{}
		return admin.Get(ctx, client.ObjectKeyFromObject(lease), again) == nil && *again.Spec.LeaseTransitions > 0
	})
	cancel()
	running.Wait()
	if err := admin.Get(ctx, client.ObjectKeyFromObject(lease), lease); err != nil || *lease.Spec.HolderIdentity != "" {
		t.Errorf("the Lease was not given back: %v (%v)", lease.Spec, err)
	}
}

// An attacker with a leader's token can only write a leader's notes on users' objects, and cannot request that an object
// reaches other members.
func TestSupervisorWritesOnlyFederationObjects(t *testing.T) {
	ctx := t.Context()
	admin, leader := newClient(t, server.Config(t)), newClient(t, as(server.Config(t), "own"))
	const namespace = "default" // of what is tried
	ports := corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}
	theirs := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "theirs", Labels: map[string]string{"whose": "theirs"}, Annotations: map[string]string{"whose": "theirs"}}, Spec: ports}
	config := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "theirs"}}
	mine := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "mine", Labels: ours}, Spec: ports}
	asked := mine.DeepCopy()
	asked.Name, asked.Annotations = "asked", map[string]string{federationv1alpha1.AnnotationGlobalService: "shop"}
	wish := map[string]string{federationv1alpha1.AnnotationPolicyAntrea: "true"}
	plain := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "plain"}}
	travelling := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "travelling", Annotations: wish}}
	posing := mine.DeepCopy()
	posing.Name, posing.Labels, posing.Annotations = "posing", nil, wish
	for _, obj := range []client.Object{theirs, config, mine, asked, plain, travelling, posing} {
		if err := admin.Create(ctx, obj); err != nil {
			t.Fatal(err)
		}
	}
	for _, obj := range admission.Own("isthmus-system") {
		if err := admin.Create(ctx, obj); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	edited := func(s *corev1.Service, edit func(*corev1.Service)) *corev1.Service {
		s = s.DeepCopy()
		edit(s)
		return s
	}
	refused := func(err error) bool {
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), admission.OwnName)
	}
	await.True(t, "the policy holds, and no other one", func() bool {
		return refused(leader.Delete(ctx, theirs.DeepCopy(), client.DryRunAll)) && leader.Delete(ctx, mine.DeepCopy(), client.DryRunAll) == nil
	})
	annotate := func(s *corev1.Service, annotations string) error {
		return leader.Patch(ctx, s.DeepCopy(), client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%s}}}`, annotations)))
	}
	for what, err := range map[string]error{
		"create without the label": leader.Create(ctx, edited(theirs, func(s *corev1.Service) { s.Name, s.ResourceVersion, s.Spec = "new", "", ports })),
		"change the spec":          leader.Update(ctx, edited(theirs, func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })),
		"take it over":             leader.Update(ctx, edited(theirs, func(s *corev1.Service) { s.Labels = ours; s.Spec.Ports[0].Port = 81 })),
		"change labels":            leader.Update(ctx, edited(theirs, func(s *corev1.Service) { s.Labels = ours })),
		"write the status": leader.Status().Update(ctx, edited(theirs, func(s *corev1.Service) {
			s.Status.Conditions = []metav1.Condition{{Type: "Told", Status: metav1.ConditionTrue, Reason: "Told", LastTransitionTime: metav1.Now()}}
		})),
		"change what has no spec":      leader.Patch(ctx, config.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"data":{"k":"v"}}`))),
		"delete":                       leader.Delete(ctx, theirs.DeepCopy()),
		"delete a policy":              leader.Delete(ctx, plain.DeepCopy()),
		"delete what is no policy":     leader.Delete(ctx, posing.DeepCopy()),
		"change a policy that travels": leader.Patch(ctx, travelling.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"policyTypes":["Egress"]}}`))),
		"annotate":                     annotate(theirs, `"example.org/k":"v"`),
		"federate a Service":           annotate(theirs, `"svc.global.federated.antreaplus.vmware-tanzu.com":"shop"`),
		"federate a policy":            annotate(theirs, `"federated.anp.antreaplus.vmware.com":"true"`),
		"take annotations away":        annotate(theirs, `"whose":null`),
		"federate its own":             annotate(mine, `"federation.isthmus.dev/service":"shop"`),
		"make a member of one": leader.Create(ctx, edited(mine, func(s *corev1.Service) {
			s.Name, s.ResourceVersion, s.Spec, s.Annotations = "new", "", ports, map[string]string{"svc.federated.antreaplus.vmware.com": "shop"}
		})),
	} {
		if !refused(err) {
			t.Errorf("%s: %v, want it refused", what, err)
		}
	}
	for what, err := range map[string]error{
		"note":         annotate(theirs, `"federation.isthmus.dev/service-status":"v","federation.isthmus.dev/policy-status":"v","federation.isthmus.dev/epoch":"1"`),
		"note nothing": annotate(theirs, `"federation.isthmus.dev/service-status":null`),
		"annotate its own, of which a person asked something": annotate(asked, `"example.org/k":"v"`),
		"delete a policy that travels":                        leader.Delete(ctx, travelling.DeepCopy()),
		"change its own":                                      leader.Update(ctx, edited(mine, func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
