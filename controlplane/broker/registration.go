package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/apply"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// registrar is what the registration needs of the broker.
type registrar interface {
	Registrations(self reconcile.Request) []source.Source
	Registration(context.Context) (v1alpha1.MemberSpec, bool, error)
	Ranges(context.Context) ([]netip.Prefix, error)
	Holds() []withdrawal.Hold
	Release(clusterset.ClusterID)
}

// registration keeps this member's copy of its Member: what the broker says of it goes in, what the member's
// people should know stands in its status, and what they ask for by annotation is done.
type registration struct {
	self      types.NamespacedName
	client    client.Client
	broker    registrar
	events    events.EventRecorder
	log       *slog.Logger
	decisions chan withdrawal.Decision
	named     chan bool // whether the cluster's DNS answers for names of the ClusterSet, as it changes

	mu       sync.Mutex
	released withdrawal.Releases // what has been done of the annotation
	names    *bool               // the last that came of named, nil before
}

// +kubebuilder:rbac:groups=isthmus.dev,resources=members,verbs=get;list;watch;patch,namespace=isthmus-system
// +kubebuilder:rbac:groups=isthmus.dev,resources=members/status,verbs=patch,namespace=isthmus-system

func (r *registration) setup(mgr ctrl.Manager, options controller.Options) error {
	options.MaxConcurrentReconciles = 1
	self := reconcile.Request{NamespacedName: r.self}
	b := ctrl.NewControllerManagedBy(mgr).
		Named("registration").
		WithOptions(options).
		For(&v1alpha1.Member{}).
		WatchesRawSource(source.TypedFunc[reconcile.Request](r.follow))
	for _, s := range r.broker.Registrations(self) {
		b.WatchesRawSource(s)
	}
	if err := b.Complete(r); err != nil {
		return fmt.Errorf("set up the registration: %w", err)
	}
	return nil
}

// Reconcile brings the Member in step.
func (r *registration) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	if req.NamespacedName != r.self {
		return ctrl.Result{}, nil
	}
	var m v1alpha1.Member
	if err := r.client.Get(ctx, r.self, &m); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.release(&m)
	err := errors.Join(r.copySpec(ctx, &m), r.tell(ctx, &m))
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: firstRetry}, nil
	}
	return ctrl.Result{}, err
}

// copySpec makes the copy say what the broker says. What the controller reads of it only when it starts
// takes effect then.
func (r *registration) copySpec(ctx context.Context, m *v1alpha1.Member) error {
	spec, ok, err := r.broker.Registration(ctx)
	if err != nil || !ok || equality.Semantic.DeepEqual(spec, m.Spec) {
		return err
	}
	want := m.DeepCopy()
	want.Spec = spec
	if err := r.client.Patch(ctx, want, client.MergeFromWithOptions(m, client.MergeFromWithOptimisticLock{}), client.FieldOwner(v1alpha1.FieldOwner)); err != nil {
		return fmt.Errorf("update member %s: %w", m.Name, err)
	}
	r.log.Info("the registration changed; what is read at start takes effect when the controller restarts")
	return nil
}

// release does what the annotation asks for, once for each time that it is asked.
func (r *registration) release(m *v1alpha1.Member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range r.released.Take(m.Annotations[v1alpha1.AnnotationReleaseHold]) {
		r.broker.Release(id)
	}
}

// tell writes into the status what is held, whether names are answered, and the ranges of the ClusterSet while they
// are known.
func (r *registration) tell(ctx context.Context, m *v1alpha1.Member) error {
	written := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name}, Spec: m.Spec, Status: *m.Status.DeepCopy()}
	ranges, err := r.broker.Ranges(ctx)
	if err != nil {
		return fmt.Errorf("read the ClusterSet's ranges: %w", err)
	}
	if len(ranges) > 0 {
		written.Status.ClusterSetIPCIDRRange = nil
		for _, p := range ranges {
			written.Status.ClusterSetIPCIDRRange = append(written.Status.ClusterSetIPCIDRRange, p.String())
		}
	}
	setChanged(&written.Status.Conditions, r.holdCondition(), m.Generation)
	setChanged(&written.Status.Conditions, r.nameCondition(), m.Generation)
	if equality.Semantic.DeepEqual(written.Status, m.Status) {
		return nil
	}
	if err := apply.ApplyStatus(ctx, r.client, written); err != nil {
		return fmt.Errorf("write status of member %s: %w", m.Name, err)
	}
	r.reportNames(m, meta.FindStatusCondition(written.Status.Conditions, v1alpha1.ConditionNamesResolve))
	return nil
}

// setChanged sets a condition that says something new, which is neither that nothing was ever held nor what is not known.
func setChanged(conditions *[]metav1.Condition, c metav1.Condition, generation int64) {
	have := meta.FindStatusCondition(*conditions, c.Type)
	if c.Status == metav1.ConditionUnknown || have == nil && c.Reason == v1alpha1.ReasonNothingHeld ||
		have != nil && have.Status == c.Status && have.Message == c.Message {
		return
	}
	c.ObservedGeneration = generation
	meta.SetStatusCondition(conditions, c)
}

// holdCondition says whether anything is held, and of whom.
func (r *registration) holdCondition() metav1.Condition {
	holds := r.broker.Holds()
	if len(holds) == 0 {
		return metav1.Condition{
			Type: v1alpha1.ConditionWithdrawalsHeld, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNothingHeld,
			Message: "every withdrawal of other members is believed",
		}
	}
	var sources []string
	for _, h := range holds {
		if s := string(h.Source); len(sources) == 0 || sources[len(sources)-1] != s {
			sources = append(sources, s)
		}
	}
	return metav1.Condition{
		Type: v1alpha1.ConditionWithdrawalsHeld, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonMassWithdrawal,
		Message: fmt.Sprintf("so much of %s vanished from the broker at once, without a word, that it is kept here; if it is meant, run isthmusctl release-hold", strings.Join(sources, " and ")),
	}
}

// nameCondition says whether pods find names of the ClusterSet. It is Unknown before that is.
func (r *registration) nameCondition() metav1.Condition {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.names == nil:
		return metav1.Condition{Type: v1alpha1.ConditionNamesResolve, Status: metav1.ConditionUnknown}
	case *r.names:
		return metav1.Condition{
			Type: v1alpha1.ConditionNamesResolve, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonNamesAnswered,
			Message: "the cluster's DNS answers pods for clusterset.local",
		}
	default:
		return metav1.Condition{
			Type: v1alpha1.ConditionNamesResolve, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNamesNotAnswered,
			Message: "the cluster's DNS does not answer pods for clusterset.local; isthmusctl dns status says why, and isthmusctl dns install mends it",
		}
	}
}

// reportNames makes an event of a condition that turned since it stood on m.
func (r *registration) reportNames(m *v1alpha1.Member, is *metav1.Condition) {
	was := meta.FindStatusCondition(m.Status.Conditions, v1alpha1.ConditionNamesResolve)
	if was == nil || is == nil || was.Status == is.Status {
		return
	}
	kind := corev1.EventTypeNormal
	if is.Status == metav1.ConditionFalse {
		kind = corev1.EventTypeWarning
	}
	r.events.Eventf(r.member(), nil, kind, is.Reason, "Resolve", "%s", is.Message)
}

// decided is told by the guards what they decide. It never waits.
func (r *registration) decided(d withdrawal.Decision) {
	select {
	case r.decisions <- d:
	default: // so many are on their way that one more tells nothing new
	}
}

// follow reports decisions to the people of the member, and has the status written of these and of names.
func (r *registration) follow(ctx context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case d := <-r.decisions:
				r.report(d)
			case answers := <-r.named:
				r.mu.Lock()
				r.names = &answers
				r.mu.Unlock()
			}
			q.Add(reconcile.Request{NamespacedName: r.self})
		}
	}()
	return nil
}

// report makes an event of what a person would want to know.
func (r *registration) report(d withdrawal.Decision) {
	about := r.member()
	switch d.Outcome {
	case withdrawal.Held:
		r.events.Eventf(about, nil, corev1.EventTypeWarning, "WithdrawalsHeld", "Import",
			"%d of %d things that member %s offered vanished from the broker without a word, and are kept here; if it is meant, run isthmusctl release-hold %s", d.Count, d.Of, d.Source, d.Source)
	case withdrawal.Released, withdrawal.Expired, withdrawal.Resolved, withdrawal.Left:
		r.events.Eventf(about, nil, corev1.EventTypeNormal, "HoldEnded", "Import", "nothing of member %s is held any more: %s", d.Source, d.Outcome)
	case withdrawal.Accepted:
	}
}

// member is the Member that events are about.
func (r *registration) member() *v1alpha1.Member {
	return &v1alpha1.Member{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "Member"},
		ObjectMeta: metav1.ObjectMeta{Namespace: r.self.Namespace, Name: r.self.Name},
	}
}
