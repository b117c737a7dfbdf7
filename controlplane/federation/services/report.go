package services

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// conditionConflict is a condition of a federated Service: member Services disagree about ports. It is there only
// while they do.
const conditionConflict = "federation.isthmus.dev/Conflict"

// Reasons of events on Services.
const (
	reasonFederated = "Federated"
	reasonNot       = "NotFederated"
	reasonConflict  = "PortConflict"
	ReasonTaken     = "NameTaken" // of the Service that has the name, too
	reasonPartly    = "NotEverywhere"
)

// taken is somebody's own Service that has the name of a federated one.
type taken struct {
	cluster clusterset.ClusterID
	name    clusterset.ServiceName
}

// applyConditions makes the conditions of the federated Service say what its members disagree about.
func (r *Reconciler) applyConditions(ctx context.Context, into reconcile.Writer, svc *corev1.Service, fed offers.Federated) error {
	conditions := slices.Clone(svc.Status.Conditions)
	if len(fed.Conflicts) == 0 {
		meta.RemoveStatusCondition(&conditions, conditionConflict)
	} else {
		var messages []string
		for _, c := range fed.Conflicts {
			messages = append(messages, c.Message())
		}
		meta.SetStatusCondition(&conditions, metav1.Condition{
			Type: conditionConflict, Status: metav1.ConditionTrue, Reason: reasonConflict, Message: short(strings.Join(messages, "; ")),
		})
	}
	if equality.Semantic.DeepEqual(conditions, svc.Status.Conditions) {
		return nil
	}
	told := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: svc.Name, ResourceVersion: svc.ResourceVersion},
		Status:     corev1.ServiceStatus{Conditions: conditions},
	}
	if err := into.ApplyStatus(ctx, told); err != nil {
		return fmt.Errorf("write conditions of service %s/%s: %w", svc.Namespace, svc.Name, err)
	}
	return nil
}

// tell says to the owners of Services in the member what became of their wishes: by an annotation, and by an event
// whenever that changes. Somebody's own Service that is in the way is told by an event alone.
func (r *Reconciler) tell(ctx context.Context, into reconcile.Writer, s *snapshot, fed offers.Federated) error {
	if slices.Contains(s.taken, into.ID()) && s.service != nil && len(s.offering) > 0 {
		if _, known := r.told.LoadOrStore(taken{into.ID(), s.name}, true); !known {
			into.Event(s.service, corev1.EventTypeWarning, ReasonTaken, "a federated Service has this name too; it is not made in this cluster, and this Service stays as it is")
		}
	}
	common := r.troubles(ctx, into, s)
	var errs []error
	for _, svc := range s.members {
		var problems []string
		reason := reasonNot
		if fault := s.faults[svc.UID]; fault != nil {
			problems = append(problems, fault.Error())
		}
		for _, c := range fed.Conflicts { // whoever it is that differs, all of them are one Service
			problems, reason = append(problems, c.Message()), reasonConflict
		}
		switch {
		case len(problems) > 0:
		case len(s.taken) > 0 || len(s.homeless) == 0 && len(common) > 0:
			reason = ReasonTaken
		case len(common) > 0:
			reason = reasonPartly
		}
		errs = append(errs, r.status(ctx, into, svc, s.name, fed, reason, append(problems, common...)))
	}
	return errors.Join(errs...)
}

// status writes one Service's annotation and event, if they are news.
func (r *Reconciler) status(ctx context.Context, into reconcile.Writer, svc *corev1.Service, name clusterset.ServiceName, fed offers.Federated, reason string, problems []string) error {
	text, eventType := fmt.Sprintf("member of %s, which leads to clusters %s", name, join(fed.Clusters)), corev1.EventTypeNormal
	if len(problems) == 0 {
		reason = reasonFederated
	} else {
		text, eventType = short(text+"; "+strings.Join(problems, "; ")), corev1.EventTypeWarning
	}
	return r.say(ctx, into, svc, text, eventType, reason)
}

// say writes text on a Service, and an event, if it is news. What was said stays news until it is read on the Service,
// which may be looked at again before that: there is one event all the same.
func (r *Reconciler) say(ctx context.Context, into reconcile.Writer, svc *corev1.Service, text, eventType, reason string) error {
	if svc.Annotations[v1alpha1.AnnotationServiceStatus] == text {
		r.said.Delete(svc.UID)
		return nil
	}
	if err := into.Annotate(ctx, svc, map[string]string{v1alpha1.AnnotationServiceStatus: text}); err != nil {
		return fmt.Errorf("write annotation %s of service %s/%s: %w", v1alpha1.AnnotationServiceStatus, svc.Namespace, svc.Name, err)
	}
	if before, _ := r.said.Swap(svc.UID, text); text != "" && before != text {
		into.Event(svc, eventType, reason, text)
	}
	return nil
}

// troubles returns what is wrong with the federated Service in any cluster, whatever its members say.
func (r *Reconciler) troubles(ctx context.Context, into reconcile.Member, s *snapshot) []string {
	var all []string
	if len(s.taken) > 0 {
		all = append(all, fmt.Sprintf("clusters %s have a Service %s of their own, and do not get it; rename one of them", join(s.taken), s.name))
	}
	if len(s.homeless) > 0 {
		all = append(all, fmt.Sprintf("clusters %s have no namespace %s, where global Services are, and do not get it; create it", join(s.homeless), r.system))
	}
	for _, cluster := range s.clusters {
		if text, ok := r.unsuited.Load(taken{cluster, s.name}); ok {
			all = append(all, fmt.Sprint(text))
		}
	}
	if !r.vips.on() {
		return all
	}
	var si v1beta1.ServiceImport
	switch err := into.Get(ctx, client.ObjectKey(s.name), &si); {
	case errors.Is(err, objectcache.ErrKindMissing):
		all = append(all, "this cluster has no ServiceImports (multicluster.x-k8s.io/v1beta1), so it gets no ClusterSetIP; install the definition")
	case err == nil && !offers.IsOurs(&si):
		all = append(all, fmt.Sprintf("this cluster has a ServiceImport %s of another origin, so the federated Service gets no ClusterSetIP here; rename one of them", s.name))
	}
	return all
}

// tellStray tells a Service that is a member of nothing: why it is not, or no more that it is.
func (r *Reconciler) tellStray(ctx context.Context, name clusterset.ServiceName, into reconcile.Writer) error {
	var svc corev1.Service
	if err := into.Get(ctx, client.ObjectKey(name), &svc); err != nil {
		return client.IgnoreNotFound(err)
	}
	switch _, member, err := offers.Name(&svc, r.system); {
	case err != nil:
		return r.say(ctx, into, &svc, short(err.Error()), corev1.EventTypeWarning, reasonNot)
	case !member:
		return r.say(ctx, into, &svc, "", "", "")
	default:
		return nil
	}
}

func join(clusters []clusterset.ClusterID) string {
	var texts []string
	for _, c := range clusters {
		texts = append(texts, string(c))
	}
	if len(texts) == 0 {
		return "none"
	}
	return strings.Join(texts, ", ")
}

// short returns text, or as much of it as an event may have.
func short(text string) string {
	const longest = 1000
	if r := []rune(text); len(r) > longest {
		return string(r[:longest]) + " …"
	}
	return text
}
