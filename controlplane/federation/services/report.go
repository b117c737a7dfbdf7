package services

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

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

// conditionConflict is a condition of a federated Service while its member Services have conflicting ports.
const conditionConflict = "federation.isthmus.dev/Conflict"

// Reasons of events on Services.
const (
	reasonFederated = "Federated"
	reasonNot       = "NotFederated"
	reasonConflict  = "PortConflict"
	ReasonTaken     = "NameTaken" // also on the user's Service that has the name
	reasonPartly    = "NotEverywhere"
	reasonHostname  = "HostnameUnreachable"
	// ReasonForeignAddress is on a ServiceImport with an address that is not the federation's.
	ReasonForeignAddress = "ForeignAddress"
)

// taken is a user's Service that has the name of a federated one.
type taken struct {
	cluster clusterset.ClusterID
	name    clusterset.ServiceName
}

// applyConditions sets the condition of the federated Service about conflicts of its members.
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
	want := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: svc.Name, ResourceVersion: svc.ResourceVersion},
		Status:     corev1.ServiceStatus{Conditions: conditions},
	}
	if err := into.ApplyStatus(ctx, want); err != nil {
		return fmt.Errorf("write conditions of service %s/%s: %w", svc.Namespace, svc.Name, err)
	}
	return nil
}

// report writes to member Services in the member what became of them: an annotation, and an event whenever it changes. A
// user's Service that has the name gets an event alone.
func (r *Reconciler) report(ctx context.Context, into reconcile.Writer, s *snapshot, fed offers.Federated) error {
	if slices.Contains(s.taken, into.ID()) && s.service != nil && len(s.offering) > 0 {
		if _, known := r.warned.LoadOrStore(taken{into.ID(), s.name}, true); !known {
			into.Event(s.service, corev1.EventTypeWarning, ReasonTaken, "a federated Service has the same name; it is not created in this cluster, and this Service stays unchanged")
		}
	}
	common, outside := r.problems(ctx, into, s), r.hostnameProblems(s)
	var errs []error
	for _, svc := range s.members {
		var problems []string
		reason := reasonNot
		if fault := s.faults[svc.UID]; fault != nil {
			problems = append(problems, fault.Error())
		}
		for _, c := range fed.Conflicts { // every member reports a conflict, because all of them are one Service
			problems, reason = append(problems, c.Message()), reasonConflict
		}
		switch {
		case len(problems) > 0:
		case len(s.taken) > 0 || len(s.lacking) == 0 && len(common) > len(r.rejections(s)):
			reason = ReasonTaken
		case len(common) > 0:
			reason = reasonPartly
		case len(outside) > 0:
			reason = reasonHostname
		}
		errs = append(errs, r.status(ctx, into, svc, s.name, fed, reason, slices.Concat(problems, common, outside)))
	}
	return errors.Join(errs...)
}

// status writes one Service's annotation and event, if they changed.
func (r *Reconciler) status(ctx context.Context, into reconcile.Writer, svc *corev1.Service, name clusterset.ServiceName, fed offers.Federated, reason string, problems []string) error {
	text, eventType := fmt.Sprintf("member of %s, which leads to clusters %s", name, join(fed.Clusters)), corev1.EventTypeNormal
	if len(problems) == 0 {
		reason = reasonFederated
	} else {
		text, eventType = short(text+"; "+strings.Join(problems, "; ")), corev1.EventTypeWarning
	}
	return r.writeStatus(ctx, into, svc, text, eventType, reason)
}

// writeStatus annotates a Service, and records an event if the text is new.
func (r *Reconciler) writeStatus(ctx context.Context, into reconcile.Writer, svc *corev1.Service, text, eventType, reason string) error {
	if svc.Annotations[v1alpha1.AnnotationServiceStatus] == text {
		return nil
	}
	if err := into.Annotate(ctx, svc, map[string]string{v1alpha1.AnnotationServiceStatus: text}); err != nil {
		return fmt.Errorf("write annotation %s of service %s/%s: %w", v1alpha1.AnnotationServiceStatus, svc.Namespace, svc.Name, err)
	}
	if text != "" {
		into.Event(svc, eventType, reason, text)
	}
	return nil
}

// problems returns the problems of the federated Service in any cluster, conflicts of its members excluded.
func (r *Reconciler) problems(ctx context.Context, into reconcile.Member, s *snapshot) []string {
	var all []string
	if len(s.taken) > 0 {
		all = append(all, fmt.Sprintf("clusters %s have a Service %s of their own and do not get the federated one; rename one of them", join(s.taken), s.name))
	}
	if len(s.lacking) > 0 {
		all = append(all, fmt.Sprintf("clusters %s lack the namespace %s of global Services and do not get this one; create it", join(s.lacking), r.system))
	}
	all = append(all, s.foreign...)
	all = append(all, r.rejections(s)...)
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

// rejections returns what clusters refuse of the federated Service, and why.
func (r *Reconciler) rejections(s *snapshot) (all []string) {
	for _, cluster := range s.clusters {
		for _, rejected := range []*sync.Map{&r.rejected, &r.rejectedVIPs} {
			if text, ok := rejected.Load(taken{cluster, s.name}); ok {
				all = append(all, fmt.Sprint(text))
			}
		}
	}
	return all
}

// reportNonMember annotates a Service that is not a member of a federated one: with the reason, or without the status of a
// former membership.
func (r *Reconciler) reportNonMember(ctx context.Context, name clusterset.ServiceName, into reconcile.Writer) error {
	var svc corev1.Service
	if err := into.Get(ctx, client.ObjectKey(name), &svc); err != nil {
		return client.IgnoreNotFound(err)
	}
	switch _, member, err := offers.Name(&svc, r.system); {
	case err != nil:
		return r.writeStatus(ctx, into, &svc, short(err.Error()), corev1.EventTypeWarning, reasonNot)
	case !member:
		return r.writeStatus(ctx, into, &svc, "", "", "")
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

// short returns text, cut to the length that an event may have.
func short(text string) string {
	const longest = 1000
	if r := []rune(text); len(r) > longest {
		return string(r[:longest]) + " …"
	}
	return text
}
