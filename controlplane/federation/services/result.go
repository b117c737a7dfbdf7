package services

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
)

// applyService makes the Service of w, which is nobody else's, be as fed says, and returns how it stands.
func (p *Part) applyService(ctx context.Context, into reconcile.Leader, w *world, fed offers.Federated) (*corev1.Service, error) {
	if w.service == nil {
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: w.name.Namespace, Name: w.name.Name}}
		if err := p.shape(svc, w, fed); err != nil {
			return nil, err
		}
		if err := create(ctx, into, svc, fed.Families); err != nil {
			return nil, fmt.Errorf("create service %s: %w", w.name, err)
		}
		p.log.Info("federated service made", "cluster", into.ID(), "namespace", svc.Namespace, "service", svc.Name, "members", fed.Clusters)
		return svc, nil
	}
	svc := w.service.DeepCopy()
	if err := p.shape(svc, w, fed); err != nil {
		return nil, err
	}
	if equality.Semantic.DeepEqual(svc, w.service) {
		return svc, nil
	}
	if err := into.Replace(ctx, svc); err != nil {
		return nil, fmt.Errorf("change service %s: %w", w.name, err)
	}
	p.log.Info("federated service changed", "cluster", into.ID(), "namespace", svc.Namespace, "service", svc.Name, "members", fed.Clusters)
	return svc, nil
}

// create creates svc with the first of families that the cluster has, and with the others that it has.
func create(ctx context.Context, into reconcile.Leader, svc *corev1.Service, families []clusterset.Family) (err error) {
	for _, f := range families {
		svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPFamily(f.String())}
		if err = into.Create(ctx, svc); !apierrors.IsInvalid(err) {
			return err
		}
	}
	return err
}

// suits notes whether a cluster takes the federated Service, by what became of it, and reports whether that is news.
func (p *Part) suits(cluster clusterset.ClusterID, w *world, fed offers.Federated, err error) bool {
	key := taken{cluster, w.name}
	switch {
	case err == nil:
		_, was := p.unsuited.LoadAndDelete(key)
		return was
	case !apierrors.IsInvalid(err):
		return false // it says nothing of the Service
	}
	text := fmt.Sprintf("cluster %s refuses it: %v", cluster, err)
	if w.service == nil && aboutFamilies(err) {
		var families []string
		for _, f := range fed.Families {
			families = append(families, f.String())
		}
		text = fmt.Sprintf("cluster %s does not get it: it has no Services of %s, which all members are of; let one be of a family that it has",
			cluster, strings.Join(families, " and "))
	}
	before, _ := p.unsuited.Swap(key, text)
	return before != text
}

// aboutFamilies reports whether an API server refuses a Service because of its families.
func aboutFamilies(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return strings.HasPrefix(c.Field, "spec.ipFamil") })
}

// shape gives svc all that fed says of it, and leaves the rest, which the API server or others added, as it is.
func (p *Part) shape(svc *corev1.Service, w *world, fed offers.Federated) error {
	metav1.SetMetaDataLabel(&svc.ObjectMeta, isthmus.LabelManagedBy, v1alpha1.ManagedBy)
	metav1.SetMetaDataAnnotation(&svc.ObjectMeta, v1alpha1.MarkFederatedService, "true")
	if p.hostname != nil {
		outside, err := p.outsideName(w.name)
		switch {
		case err != nil:
			return fmt.Errorf("spec.hostnameTemplate of the Federation, for service %s: %w", w.name, err)
		case w.asksName:
			metav1.SetMetaDataAnnotation(&svc.ObjectMeta, v1alpha1.AnnotationHostname, outside)
		case svc.Annotations[v1alpha1.AnnotationHostname] == outside: // else a person wrote it
			delete(svc.Annotations, v1alpha1.AnnotationHostname)
		}
	}
	svc.Spec.Type, svc.Spec.Selector, svc.Spec.ExternalIPs = corev1.ServiceTypeClusterIP, nil, nil
	svc.Spec.ExternalName, svc.Spec.ExternalTrafficPolicy = "", ""
	svc.Spec.Ports = servicePorts(fed.Ports)
	svc.Spec.SessionAffinity, svc.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
	if fed.Affinity.ClientIP {
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(fed.Affinity.Timeout / time.Second))},
		}
	}
	shapeFamilies(&svc.Spec, fed.Families)
	return nil
}

// servicePorts returns ports as the API server stores them.
func servicePorts(ports []clusterset.Port) []corev1.ServicePort {
	var all []corev1.ServicePort
	for _, p := range ports {
		q := corev1.ServicePort{
			Name: p.Name, Protocol: corev1.Protocol(p.Protocol.String()), Port: int32(p.Port), TargetPort: intstr.FromInt32(int32(p.Port)),
		}
		if p.AppProtocol != "" {
			q.AppProtocol = &p.AppProtocol
		}
		all = append(all, q)
	}
	return all
}

// shapeFamilies asks for families. The first family of a Service that exists can never change, so it stays, and the
// others come beside it.
func shapeFamilies(spec *corev1.ServiceSpec, families []clusterset.Family) {
	policy := corev1.IPFamilyPolicySingleStack
	if len(families) > 1 || len(spec.IPFamilies) > 0 && !slices.Contains(families, familyOf(spec.IPFamilies[0])) {
		policy = corev1.IPFamilyPolicyPreferDualStack
	}
	if policy == corev1.IPFamilyPolicySingleStack && len(spec.IPFamilies) > 1 {
		spec.IPFamilies, spec.ClusterIPs = spec.IPFamilies[:1], spec.ClusterIPs[:1]
	}
	spec.IPFamilyPolicy = &policy
}

func familyOf(f corev1.IPFamily) clusterset.Family {
	if f == corev1.IPv6Protocol {
		return clusterset.IPv6
	}
	return clusterset.IPv4
}
