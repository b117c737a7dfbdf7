package workloads

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// reconcile brings all Services of machines in line.
func (c *Controller) reconcile(ctx context.Context) error {
	if !c.cache.Synced() {
		return nil // the next change calls it again
	}
	var workloads v1alpha1.ExternalWorkloadList
	if err := c.cache.List(ctx, &workloads); err != nil && !errors.Is(err, objectcache.ErrKindMissing) {
		return err
	}
	have, err := c.observe(ctx)
	if err != nil {
		return err
	}
	var machines []machine
	var problems []problem
	unread := map[source]bool{}
	for i := range workloads.Items {
		machines = append(machines, ofWorkload(&workloads.Items[i]))
	}
	for _, f := range c.pollers {
		of, wrong, ok := f.machines()
		if !ok {
			unread[f.source] = true
		}
		machines, problems = append(machines, of...), append(problems, wrong...)
	}
	var errs []error
	offers := build(machines, have.kept(unread))
	for _, o := range offers {
		fault, err := c.apply(ctx, o, have[o.name], unread)
		errs = append(errs, withoutConflict(err))
		if fault != "" {
			for _, m := range machines {
				if m.service == o.name {
					problems = append(problems, problem{m, fault})
				}
			}
		}
		problems = append(problems, o.problems...)
	}
	for name, s := range have {
		if !slices.ContainsFunc(offers, func(o offer) bool { return o.name == name }) {
			errs = append(errs, withoutConflict(c.remove(ctx, name, s, unread)))
		}
	}
	refused, faults, err := c.enforce(ctx, machines, unread)
	named, failed := c.externalNodes(ctx, machines, unread)
	if errors.Is(failed, errAntreaMissing) {
		faults, failed = append(faults, failed.Error()), nil
	}
	errs, problems = append(errs, err, failed), slices.Concat(problems, refused, named)
	c.report(problems, faults)
	for i := range workloads.Items {
		errs = append(errs, withoutConflict(c.writeStatus(ctx, &workloads.Items[i], problems)))
	}
	return errors.Join(errs...)
}

// withoutConflict returns err, unless it is a conflict: the change that caused it triggers another reconciliation.
func withoutConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// observed holds the existing objects by Service.
type observed map[clusterset.ServiceName]observedService

// observedService is an existing Service of machines, nil if there is none, and its slices.
type observedService struct {
	service *corev1.Service
	slices  []*discoveryv1.EndpointSlice
}

// observe returns the objects that were written before.
func (c *Controller) observe(ctx context.Context) (observed, error) {
	var services corev1.ServiceList
	var list discoveryv1.EndpointSliceList
	if err := errors.Join(c.cache.List(ctx, &services), c.cache.List(ctx, &list)); err != nil {
		return nil, err
	}
	all := observed{}
	for i := range services.Items {
		svc := &services.Items[i]
		all[clusterset.ServiceName{Namespace: svc.Namespace, Name: svc.Name}] = observedService{service: svc}
	}
	for i := range list.Items {
		es := &list.Items[i]
		name := clusterset.ServiceName{Namespace: es.Namespace, Name: es.Labels[discoveryv1.LabelServiceName]}
		s := all[name]
		s.slices = append(s.slices, es)
		all[name] = s
	}
	return all, nil
}

// kept returns the ports of Services that machines of unread sources may serve.
func (all observed) kept(unread map[source]bool) map[clusterset.ServiceName][]port {
	kept := map[clusterset.ServiceName][]port{}
	for name, s := range all {
		if s.service == nil || !slices.ContainsFunc(s.slices, func(es *discoveryv1.EndpointSlice) bool { return unread[sourceOf(es)] }) {
			continue
		}
		for _, p := range s.service.Spec.Ports {
			kept[name] = append(kept[name], newPort(p.Name, p.Port, p.Protocol, p.Port))
		}
	}
	return kept
}

// report logs new problems of machines and other faults, and publishes all of them for State.
func (c *Controller) report(problems []problem, faults []string) {
	current := map[string]bool{}
	tell := func(message, text string) {
		if current[text] = true; !c.logged[text] {
			c.cfg.Log.Warn(message, "problem", text)
		}
	}
	for _, p := range problems {
		tell("a machine is not offered as requested", fmt.Sprintf("%s: %s", p.of, p.text))
	}
	for _, text := range faults {
		tell("policies do not apply to machines as they are written", text)
	}
	c.logged = current
	c.publish(State{Clouds: states(c.pollers, c.enforcements), Problems: slices.Sorted(maps.Keys(current))})
}

// Reasons of the condition Offered.
const (
	reasonOffered = "Offered"
	reasonProblem = "NotAsAsked"
)

// writeStatus writes the state of an ExternalWorkload to it.
func (c *Controller) writeStatus(ctx context.Context, w *v1alpha1.ExternalWorkload, problems []problem) error {
	m := ofWorkload(w)
	offered := metav1.Condition{
		Type: v1alpha1.ConditionOffered, Status: metav1.ConditionTrue, Reason: reasonOffered, ObservedGeneration: w.Generation,
		Message: fmt.Sprintf("service %s leads to the machine while it is ready", m.service),
	}
	for _, p := range problems {
		if p.of.source == m.source && p.of.id == m.id {
			offered.Status, offered.Reason, offered.Message = metav1.ConditionFalse, reasonProblem, p.text
			break
		}
	}
	before := w.Status.DeepCopy()
	w.Status.Service = m.service.Name
	meta.SetStatusCondition(&w.Status.Conditions, offered)
	if equality.Semantic.DeepEqual(*before, w.Status) {
		return nil
	}
	if err := client.IgnoreNotFound(c.client.Status().Update(ctx, w)); err != nil {
		return fmt.Errorf("write the status of externalworkload %s: %w", m.id, err)
	}
	return nil
}
