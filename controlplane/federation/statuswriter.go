package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/engine"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// Reasons of the condition Ready.
const (
	reasonReady       = "MembersReachable"
	reasonNoMembers   = "NoMembers"
	reasonUnreachable = "MembersUnreachable"
	reasonDenied      = "MembersDenyReading"
	reasonUnfenced    = "MembersUnfenced"
	reasonProblem     = "NotDoingItsPart"
)

const (
	// reasonHeld is the reason of the condition Holding, and of the event when withdrawals begin to be held back.
	reasonHeld = "MuchVanished"
	// reasonHoldEnded is the reason of the event when no more withdrawals are held back.
	reasonHoldEnded = "HoldEnded"
)

// statusWriter maintains the status of the cluster's Federation, and the cluster's own claims.
type statusWriter struct {
	client   client.WithWatch
	local    *objectcache.Cache
	state    func() State
	interval time.Duration
	log      *slog.Logger
}

// run writes until ctx ends. local is the API server of the cluster, for events.
func (w *statusWriter) run(ctx context.Context, local *rest.Config) error {
	writer, err := engine.NewEventWriter(local, nil)
	if err != nil {
		return err
	}
	defer writer.Shutdown()
	if err := writer.Run(ctx, w.log); err != nil {
		return err
	}
	recorder := writer.NewRecorder(scheme, "isthmus-federation")
	tick := time.NewTicker(w.interval)
	defer tick.Stop()
	for {
		if err := w.writeStatus(ctx, recorder); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) {
			w.log.Error("the Federation's status cannot be written", "err", err)
		}
		if err := w.keepClaims(ctx); err != nil && ctx.Err() == nil {
			w.log.Error("the cluster's claims cannot be written", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// writeStatus writes the state that this process sees to the status of the cluster's Federation, if that differs.
func (w *statusWriter) writeStatus(ctx context.Context, recorder events.EventRecorder) error {
	have := &federationv1alpha1.Federation{}
	err := w.local.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, have)
	if errors.Is(err, objectcache.ErrNotSynced) || errors.Is(err, objectcache.ErrKindMissing) {
		return nil
	}
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	want := have.DeepCopy()
	w.describe(&want.Status, have)
	if equality.Semantic.DeepEqual(want.Status, have.Status) {
		return nil
	}
	if err := w.client.Status().Update(ctx, want); err != nil {
		return err
	}
	recordHolds(want, have.Status.Members, recorder)
	return nil
}

// recordHolds records an event for each hold that begins or ends. Every supervisor records it on its own Federation.
func recordHolds(federation *federationv1alpha1.Federation, before []federationv1alpha1.MemberStatus, recorder events.EventRecorder) {
	was := map[string]int64{}
	for _, m := range before {
		was[m.ClusterID] = m.Held
	}
	for _, m := range federation.Status.Members {
		switch {
		case m.Held > 0 && was[m.ClusterID] == 0:
			recorder.Eventf(federation, nil, corev1.EventTypeWarning, reasonHeld, reasonHeld, "%s", heldText(m))
		case m.Held == 0 && was[m.ClusterID] > 0:
			recorder.Eventf(federation, nil, corev1.EventTypeNormal, reasonHoldEnded, reasonHoldEnded,
				"no withdrawals of member %s are held back any more: its objects are back, were withdrawn explicitly, or the withdrawal was accepted", m.ClusterID)
		}
	}
}

func heldText(m federationv1alpha1.MemberStatus) string {
	return fmt.Sprintf("member %s: %d federated Services and policies vanished at once without being withdrawn, and are kept for an hour; "+
		"if that was intended, run isthmusctl federation release %[1]s", m.ClusterID, m.Held)
}

// holding returns the condition that withdrawals are held back, nil if there are none.
func holding(members []federationv1alpha1.MemberStatus) *metav1.Condition {
	var texts []string
	for _, m := range members {
		if m.Held > 0 {
			texts = append(texts, heldText(m))
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return &metav1.Condition{Status: metav1.ConditionTrue, Reason: reasonHeld, Message: strings.Join(texts, "; ")}
}

// describe sets status to the current state.
func (w *statusWriter) describe(status *federationv1alpha1.FederationStatus, of *federationv1alpha1.Federation) {
	state := w.state()
	status.ObservedGeneration = of.Generation
	before := status.Members
	status.Members = nil
	for _, m := range state.Members {
		is := federationv1alpha1.MemberStatus{
			ClusterID: string(m.ID), ClusterUID: m.UID, Leader: m.Leader, Epoch: m.Epoch, Reachable: m.Reachable, Supervisor: m.Supervisor,
			Message: cmp.Or(m.Problem, m.Stuck, exposed(m)) + buried(m), Services: int64(m.Counts["services"]), Policies: int64(m.Counts["policies"]), Held: int64(m.Held),
		}
		i := slices.IndexFunc(before, func(b federationv1alpha1.MemberStatus) bool { return b.ClusterID == is.ClusterID })
		if i >= 0 && is.ClusterUID == "" {
			is.ClusterUID = before[i].ClusterUID // this process has not reached the member yet
		}
		status.Members = append(status.Members, is)
	}
	condition := ready(state)
	condition.ObservedGeneration = of.Generation
	meta.SetStatusCondition(&status.Conditions, condition)
	for _, is := range []struct {
		kind      string
		condition *metav1.Condition // nil: absent
	}{
		{federationv1alpha1.ConditionHolding, holding(status.Members)},
		{federationv1alpha1.ConditionSettingsDiffer, differing(of.Spec, state)},
		{federationv1alpha1.ConditionGrantsOpen, open(of.Spec)},
	} {
		if is.condition == nil {
			meta.RemoveStatusCondition(&status.Conditions, is.kind)
			continue
		}
		is.condition.Type, is.condition.ObservedGeneration = is.kind, of.Generation
		meta.SetStatusCondition(&status.Conditions, *is.condition)
	}
}

// exposed says that a member does not reject writes of former leaders.
func exposed(m engine.MemberState) string {
	if !m.Unfenced {
		return ""
	}
	return "its API server does not reject writes of former leaders, so two of them could undo each other's work; " +
		"run isthmusctl federation create again, or apply deploy/manifests/federation-member.yaml"
}

// buried says that a member's endpoints are not used.
func buried(m engine.MemberState) string {
	switch {
	case !m.Dead:
		return ""
	case m.Reachable:
		return "it was dead more than once; federated Services lead there again when it has answered for a while"
	default:
		return "; its endpoints do not answer either, so federated Services lead there only where no other cluster serves"
	}
}

// differing returns the condition that other supervisors have other settings, nil if none is known to.
func differing(spec federationv1alpha1.FederationSpec, state State) *metav1.Condition {
	mine := member.SettingsOf(spec)
	var texts []string
	for _, m := range state.Members {
		switch fields := mine.Differences(m.Settings); {
		case m.ID == state.Cluster:
		case m.Settings.Denied:
			texts = append(texts, fmt.Sprintf("supervisor %s does not let others read its Federation; run isthmusctl federation create again, which gives the right", m.ID))
		case len(fields) > 0:
			texts = append(texts, fmt.Sprintf("supervisor %s has another value of spec.%s", m.ID, strings.Join(fields, ", spec.")))
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return &metav1.Condition{
		Status: metav1.ConditionTrue, Reason: "OtherSettings",
		Message: strings.Join(texts, "; ") + "; what leaders write depends on the supervisor that leads a member: make the Federations the same",
	}
}

// open returns the condition about spec.grants, nil in a cluster that leads no member.
func open(spec federationv1alpha1.FederationSpec) *metav1.Condition {
	if len(spec.Members) == 0 {
		return nil
	}
	if spec.Grants == nil {
		return &metav1.Condition{
			Status: metav1.ConditionTrue, Reason: "NoGrants",
			Message: "spec.grants is absent, so any namespace of any member joins any federated Service, and any annotated policy is replicated; " +
				"set it, or run isthmusctl federation create again, which proposes the grants for what is there",
		}
	}
	return &metav1.Condition{
		Status: metav1.ConditionFalse, Reason: "Granted",
		Message: fmt.Sprintf("spec.grants has %d grants; what none of them allows is refused", len(spec.Grants)),
	}
}

// ready returns the condition Ready.
func ready(state State) metav1.Condition {
	var unreachable, denying, exposed []string
	for _, m := range state.Members {
		switch {
		case !m.Reachable:
			unreachable = append(unreachable, string(m.ID))
		case m.Stuck != "":
			denying = append(denying, string(m.ID))
		case m.Unfenced:
			exposed = append(exposed, string(m.ID))
		}
	}
	c := metav1.Condition{Type: federationv1alpha1.ConditionReady, Status: metav1.ConditionTrue}
	switch {
	case state.Problem != "":
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, reasonProblem, state.Problem
	case len(state.Members) == 0:
		c.Reason, c.Message = reasonNoMembers, "this cluster leads no member"
	case len(unreachable) > 0:
		c.Status, c.Reason = metav1.ConditionFalse, reasonUnreachable
		c.Message = fmt.Sprintf("not reachable: %s; see the messages of status.members", strings.Join(unreachable, ", "))
	case len(denying) > 0:
		c.Status, c.Reason = metav1.ConditionFalse, reasonDenied
		c.Message = fmt.Sprintf("rights are missing in: %s; see the messages of status.members", strings.Join(denying, ", "))
	case len(exposed) > 0:
		c.Status, c.Reason = metav1.ConditionFalse, reasonUnfenced
		c.Message = fmt.Sprintf("former leaders are not kept out of: %s; see the messages of status.members", strings.Join(exposed, ", "))
	default:
		c.Reason, c.Message = reasonReady, "every member is reachable"
	}
	return c
}
