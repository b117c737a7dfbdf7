package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

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
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/credential"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/nodes"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/apply"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// registrar is the part of the broker client that a registration uses.
type registrar interface {
	Registrations(self reconcile.Request) []source.Source
	Registration(context.Context) (v1alpha1.MemberSpec, bool, error)
	Ranges(context.Context) ([]netip.Prefix, error)
	Holds() []withdrawal.Hold
	Release(clusterset.ClusterID)
}

// registration reconciles this cluster's Member: it copies the spec from the broker, reports holds, DNS, pods outside of the
// registration and the ClusterSet's ranges in the status, and releases the holds that its annotation names.
type registration struct {
	self       types.NamespacedName
	client     client.Client
	broker     registrar
	credential func() credential.State
	events     events.EventRecorder
	log        *slog.Logger
	decisions  chan withdrawal.Decision
	dnsResults chan bool // whether the cluster's DNS answers for clusterset.local, at each change

	credentials chan struct{} // after each renewal of the token for the broker, or a failure
	nodes       *nodes.Nodes  // nil follows none
	podCIDRs    chan struct{} // after each change of those of the Nodes

	mu         sync.Mutex
	released   withdrawal.Releases // the handled requests of the annotation
	dnsAnswers *bool               // the last of dnsResults, nil before the first
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
		WatchesRawSource(source.TypedFunc[reconcile.Request](r.forward))
	for _, s := range r.broker.Registrations(self) {
		b.WatchesRawSource(s)
	}
	if err := b.Complete(r); err != nil {
		return fmt.Errorf("set up the registration: %w", err)
	}
	return nil
}

// Reconcile updates the Member, and releases holds on request.
func (r *registration) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	if req.NamespacedName != r.self {
		return ctrl.Result{}, nil
	}
	var m v1alpha1.Member
	if err := r.client.Get(ctx, r.self, &m); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	r.release(&m)
	err := errors.Join(r.copySpec(ctx, &m), r.writeStatus(ctx, &m))
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: firstRetry}, nil
	}
	return ctrl.Result{}, err
}

// copySpec copies the spec from the broker. Fields that the controller reads only at start take effect after a restart.
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
	r.log.Info("the registration changed; restart the controller to apply fields that it reads at start")
	return nil
}

// release releases the holds that the annotation names, once for each request.
func (r *registration) release(m *v1alpha1.Member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range r.released.Take(m.Annotations[v1alpha1.AnnotationReleaseHold]) {
		r.broker.Release(id)
	}
}

// writeStatus reports holds, the result of the DNS check, and the ranges of the ClusterSet while they are known.
func (r *registration) writeStatus(ctx context.Context, m *v1alpha1.Member) error {
	written := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name}, Spec: m.Spec, Status: *m.Status.DeepCopy()}
	ranges, err := r.broker.Ranges(ctx)
	if err != nil {
		return fmt.Errorf("read the ranges of the ClusterSet: %w", err)
	}
	if len(ranges) > 0 {
		written.Status.ClusterSetIPCIDRRange = nil
		for _, p := range ranges {
			written.Status.ClusterSetIPCIDRRange = append(written.Status.ClusterSetIPCIDRRange, p.String())
		}
	}
	setChanged(&written.Status.Conditions, r.holdCondition(), m.Generation)
	setChanged(&written.Status.Conditions, r.dnsCondition(), m.Generation)
	setChanged(&written.Status.Conditions, r.credentialCondition(), m.Generation)
	setChanged(&written.Status.Conditions, r.podCondition(m), m.Generation)
	if equality.Semantic.DeepEqual(written.Status, m.Status) {
		return nil
	}
	if err := apply.Status(ctx, r.client, written); err != nil {
		return fmt.Errorf("write status of member %s: %w", m.Name, err)
	}
	r.reportDNS(m, meta.FindStatusCondition(written.Status.Conditions, v1alpha1.ConditionNamesResolve))
	r.reportPods(m, meta.FindStatusCondition(written.Status.Conditions, v1alpha1.ConditionPodsRegistered))
	return nil
}

// setChanged sets a condition that changed. It skips an unknown one, and a first one that reports no hold or no pods outside.
func setChanged(conditions *[]metav1.Condition, c metav1.Condition, generation int64) {
	have := meta.FindStatusCondition(*conditions, c.Type)
	if c.Status == metav1.ConditionUnknown || have == nil && (c.Reason == v1alpha1.ReasonNothingHeld || c.Reason == v1alpha1.ReasonPodsInside) ||
		have != nil && have.Status == c.Status && have.Message == c.Message {
		return
	}
	c.ObservedGeneration = generation
	meta.SetStatusCondition(conditions, c)
}

// holdCondition reports whether withdrawals are held, and of which members.
func (r *registration) holdCondition() metav1.Condition {
	holds := r.broker.Holds()
	if len(holds) == 0 {
		return metav1.Condition{
			Type: v1alpha1.ConditionWithdrawalsHeld, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNothingHeld,
			Message: "no withdrawal of another member is held",
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
		Message: fmt.Sprintf("many exports of %s vanished from the broker together without being withdrawn, so their imports stay; if this is intended, run isthmusctl release-hold", strings.Join(sources, " and ")),
	}
}

// dnsCondition reports whether the cluster's DNS answers for clusterset.local. It is Unknown before the first result.
func (r *registration) dnsCondition() metav1.Condition {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.dnsAnswers == nil:
		return metav1.Condition{Type: v1alpha1.ConditionNamesResolve, Status: metav1.ConditionUnknown}
	case *r.dnsAnswers:
		return metav1.Condition{
			Type: v1alpha1.ConditionNamesResolve, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonNamesAnswered,
			Message: "the cluster's DNS answers pods for clusterset.local",
		}
	default:
		return metav1.Condition{
			Type: v1alpha1.ConditionNamesResolve, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNamesNotAnswered,
			Message: "the cluster's DNS does not answer pods for clusterset.local; isthmusctl dns status shows the cause, and isthmusctl dns install repairs it",
		}
	}
}

// credentialCondition reports until when the token for the broker is valid, and why it is not renewed. It is Unknown for a
// credential that the controller does not renew.
func (r *registration) credentialCondition() metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionCredentialValid, Status: metav1.ConditionUnknown}
	if r.credential == nil {
		return c
	}
	s := r.credential()
	switch {
	case !s.Managed:
		return c
	case s.Ended:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, v1alpha1.ReasonCredentialEnded, s.Err.Error()
	case s.Err != nil && !s.Expires.IsZero():
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonCredentialNotRenewed
		c.Message = fmt.Sprintf("the token for the broker is valid until %s and is not renewed: %s", s.Expires.UTC().Format(time.RFC3339), s.Err)
	case s.Expires.IsZero():
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonCredentialWithoutTerm
		c.Message = "the token for the broker does not expire; the controller replaces it when isthmusctl deploy-broker has updated the broker"
	default:
		c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonCredentialRenewed
		c.Message = fmt.Sprintf("the token for the broker is valid until %s; the controller renews it", s.Expires.UTC().Format(time.RFC3339))
	}
	return c
}

// credentialChanged enqueues the Member after a renewal. It never waits.
func (r *registration) credentialChanged() {
	select {
	case r.credentials <- struct{}{}:
	default:
	}
}

// reportDNS records an event if the condition changed since m.
func (r *registration) reportDNS(m *v1alpha1.Member, is *metav1.Condition) {
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

// decided receives the decisions of the withdrawal guards. It never waits.
func (r *registration) decided(d withdrawal.Decision) {
	select {
	case r.decisions <- d:
	default: // 64 are queued already; one more adds nothing
	}
}

// forward records events for decisions, and enqueues the Member for decisions and DNS results.
func (r *registration) forward(ctx context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case d := <-r.decisions:
				r.report(d)
			case <-r.credentials:
			case <-r.podCIDRs:
			case answers := <-r.dnsResults:
				r.mu.Lock()
				r.dnsAnswers = &answers
				r.mu.Unlock()
			}
			q.Add(reconcile.Request{NamespacedName: r.self})
		}
	}()
	return nil
}

// report records an event for a hold and for its end.
func (r *registration) report(d withdrawal.Decision) {
	about := r.member()
	switch d.Outcome {
	case withdrawal.Held:
		r.events.Eventf(about, nil, corev1.EventTypeWarning, "WithdrawalsHeld", "Import",
			"%d of %d exports of member %s vanished from the broker without being withdrawn, so their imports stay; if this is intended, run isthmusctl release-hold %s", d.Count, d.Of, d.Source, d.Source)
	case withdrawal.Released, withdrawal.Expired, withdrawal.Resolved, withdrawal.Left, withdrawal.Confirmed:
		r.events.Eventf(about, nil, corev1.EventTypeNormal, "HoldEnded", "Import", "the hold on member %s ended: %s", d.Source, d.Outcome)
	case withdrawal.Accepted:
	}
}

// member returns the Member as the object of events.
func (r *registration) member() *v1alpha1.Member {
	return &v1alpha1.Member{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "Member"},
		ObjectMeta: metav1.ObjectMeta{Namespace: r.self.Namespace, Name: r.self.Name},
	}
}
