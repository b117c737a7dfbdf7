package workloads

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// annotationCarried lists the annotations of a Service that come from its machines and go with them. Others are a user's.
const annotationCarried = "federation.isthmus.dev/from-machines"

// errTaken is returned when a user's Service has the name.
var errTaken = errors.New("the name is taken")

// apply creates or updates a Service and its slices. fault is a reason for users why that is impossible.
func (c *Controller) apply(ctx context.Context, o offer, have observedService, unread map[source]bool) (fault string, err error) {
	if len(o.ports) == 0 && have.service == nil { // of load balancers that have no listeners yet
		return "", c.removeSlices(ctx, have, unread)
	}
	svc, err := c.applyService(ctx, o, have.service)
	switch {
	case errors.Is(err, errTaken):
		const text = "service %s is not one of machines and stays unchanged; rename one of them"
		return fmt.Sprintf(text, o.name), c.removeSlices(ctx, have, unread)
	case apierrors.IsNotFound(err):
		return fmt.Sprintf("there is no namespace %s; create it", o.name.Namespace), nil
	case apierrors.IsInvalid(err): // such as a name that begins with a digit, before Kubernetes 1.36
		return fmt.Sprintf("this cluster refuses service %s: %v", o.name, err), nil
	case err != nil:
		return "", err
	}
	old := map[string]*discoveryv1.EndpointSlice{}
	for _, es := range have.slices {
		old[es.Name] = es
	}
	for _, es := range o.slices {
		es.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: svc.Name, UID: svc.UID}}
		if err := c.applySlice(ctx, es, old[es.Name]); err != nil {
			return "", fmt.Errorf("write endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
		delete(old, es.Name)
	}
	return "", c.removeSlices(ctx, observedService{slices: slices.Collect(maps.Values(old))}, unread)
}

// applyService creates or updates the Service of an offer, and returns it as stored.
func (c *Controller) applyService(ctx context.Context, o offer, have *corev1.Service) (*corev1.Service, error) {
	if have == nil { // or it was created a moment ago and is not in the cache yet
		svc := &corev1.Service{}
		err := c.client.Get(ctx, client.ObjectKey(o.name), svc)
		if apierrors.IsNotFound(err) {
			svc.Namespace, svc.Name = o.name.Namespace, o.name.Name
			svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyPreferDualStack)
			o.shape(svc)
			if err := c.client.Create(ctx, svc); err != nil {
				return nil, err
			}
			c.cfg.Log.Info("a Service of machines created", "namespace", svc.Namespace, "service", svc.Name)
			return svc, nil
		}
		if err != nil {
			return nil, err
		}
		if svc.Labels[isthmus.LabelManagedBy] != v1alpha1.ManagedByMachines {
			if err := c.warnOwner(ctx, svc); err != nil {
				return nil, err
			}
			return nil, errTaken
		}
		have = svc
	}
	svc := have.DeepCopy()
	o.shape(svc)
	if equality.Semantic.DeepEqual(svc, have) {
		return svc, nil
	}
	if err := c.client.Update(ctx, svc); err != nil {
		return nil, fmt.Errorf("change service %s: %w", o.name, err)
	}
	return svc, nil
}

// warnOwner records an event on a Service that machines ask for its name, once for as long as the event exists.
func (c *Controller) warnOwner(ctx context.Context, svc *corev1.Service) error {
	if c.warned[svc.UID] {
		return nil
	}
	err := c.client.Create(ctx, &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: fmt.Sprintf("%s.machines-%s", svc.Name, svc.UID)},
		Regarding:  corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: svc.Namespace, Name: svc.Name, UID: svc.UID},
		Type:       corev1.EventTypeWarning, Reason: "NameTaken", Action: "OfferMachines",
		Note:      "machines or load balancers outside of the cluster ask for a service of this name; this service stays unchanged; rename one of them",
		EventTime: metav1.NowMicro(), ReportingController: v1alpha1.ManagedByMachines, ReportingInstance: name,
	})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("write an event on service %s/%s that its name is wanted: %w", svc.Namespace, svc.Name, err)
	}
	c.warned[svc.UID] = true
	return nil
}

// shape sets the fields of svc that o defines, and leaves the fields that the API server or users added.
func (o offer) shape(svc *corev1.Service) {
	metav1.SetMetaDataLabel(&svc.ObjectMeta, isthmus.LabelManagedBy, v1alpha1.ManagedByMachines)
	for key := range strings.SplitSeq(svc.Annotations[annotationCarried], ",") {
		if _, still := o.annotations[key]; !still {
			delete(svc.Annotations, key)
		}
	}
	metav1.SetMetaDataAnnotation(&svc.ObjectMeta, v1alpha1.MarkVirtualMachines, "true")
	metav1.SetMetaDataAnnotation(&svc.ObjectMeta, annotationCarried, strings.Join(slices.Sorted(maps.Keys(o.annotations)), ","))
	maps.Copy(svc.Annotations, o.annotations)
	svc.Spec.Type, svc.Spec.Selector = corev1.ServiceTypeClusterIP, nil
	if len(o.ports) > 0 { // or it keeps those that it had, because there is no Service without ports
		svc.Spec.Ports = nil
	}
	for _, p := range o.ports {
		svc.Spec.Ports = append(svc.Spec.Ports, p.servicePort())
	}
}

// applySlice creates or updates a slice.
func (c *Controller) applySlice(ctx context.Context, want, have *discoveryv1.EndpointSlice) error {
	if have == nil {
		err := c.client.Create(ctx, want)
		if !apierrors.IsAlreadyExists(err) {
			return err
		}
		have = &discoveryv1.EndpointSlice{} // created a moment ago and not in the cache yet
		if err := c.client.Get(ctx, client.ObjectKeyFromObject(want), have); err != nil {
			return err
		}
	}
	es := have.DeepCopy()
	es.Labels, es.OwnerReferences, es.Endpoints, es.Ports = want.Labels, want.OwnerReferences, want.Endpoints, want.Ports
	if equality.Semantic.DeepEqual(es, have) {
		return nil
	}
	return c.client.Update(ctx, es)
}

// remove deletes a Service without machines. It stays while a source is unread, because a server without an address may
// belong to it, or a load balancer without listeners.
func (c *Controller) remove(ctx context.Context, name clusterset.ServiceName, have observedService, unread map[source]bool) error {
	if have.service != nil && len(unread) == 0 {
		if err := c.delete(ctx, have.service); err != nil {
			return fmt.Errorf("delete service %s: %w", name, err)
		}
		c.cfg.Log.Info("a Service of machines deleted", "namespace", name.Namespace, "service", name.Name)
	}
	return c.removeSlices(ctx, have, unread)
}

// removeSlices deletes slices, except for those of unread sources.
func (c *Controller) removeSlices(ctx context.Context, have observedService, unread map[source]bool) error {
	for _, es := range have.slices {
		if unread[sourceOf(es)] {
			continue
		}
		if err := c.delete(ctx, es); err != nil {
			return fmt.Errorf("delete endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
	}
	return nil
}

// delete deletes o if it is still the object that was read. An object that is already gone is not an error.
func (c *Controller) delete(ctx context.Context, o client.Object) error {
	uid, version := o.GetUID(), o.GetResourceVersion()
	return client.IgnoreNotFound(c.client.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version}))
}
