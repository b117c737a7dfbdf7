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

// applyService creates or updates the federated Service, whose name no user's Service has, and returns it as stored.
func (r *Reconciler) applyService(ctx context.Context, into reconcile.Writer, s *snapshot, fed offers.Federated) (*corev1.Service, error) {
	if s.service == nil {
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: s.name.Namespace, Name: s.name.Name}}
		if err := r.shape(svc, s, fed); err != nil {
			return nil, err
		}
		if err := create(ctx, into, svc, fed.Families); err != nil {
			return nil, fmt.Errorf("create service %s: %w", s.name, err)
		}
		r.log.Info("federated service created", "cluster", into.ID(), "namespace", svc.Namespace, "service", svc.Name, "members", fed.Clusters)
		return svc, nil
	}
	svc := s.service.DeepCopy()
	if err := r.shape(svc, s, fed); err != nil {
		return nil, err
	}
	if equality.Semantic.DeepEqual(svc, s.service) {
		return svc, nil
	}
	if err := into.Replace(ctx, svc); err != nil {
		return nil, fmt.Errorf("change service %s: %w", s.name, err)
	}
	r.noteChanged(into, s.name)
	r.log.Info("federated service changed", "cluster", into.ID(), "namespace", svc.Namespace, "service", svc.Name, "members", fed.Clusters)
	return svc, nil
}

// create creates svc with the first of families that the cluster has, and with the others that it has.
func create(ctx context.Context, into reconcile.Writer, svc *corev1.Service, families []clusterset.Family) (err error) {
	for _, f := range families {
		svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPFamily(f.String())}
		if err = into.Create(ctx, svc); !apierrors.IsInvalid(err) {
			return err
		}
	}
	return err
}

// recordRejection records whether a cluster accepts the federated Service, given the error of the write, and reports
// whether that changed.
func (r *Reconciler) recordRejection(cluster clusterset.ClusterID, s *snapshot, fed offers.Federated, err error) bool {
	key := taken{cluster, s.name}
	switch {
	case err == nil:
		_, was := r.rejected.LoadAndDelete(key)
		return was
	case !apierrors.IsInvalid(err):
		return false // the error is not about the Service
	}
	text := fmt.Sprintf("cluster %s refuses it: %v", cluster, err)
	if s.service == nil && aboutFamilies(err) {
		var families []string
		for _, f := range fed.Families {
			families = append(families, f.String())
		}
		text = fmt.Sprintf("cluster %s does not get it: the cluster has no Services of %s, the families of all members; add a member of a family that the cluster has",
			cluster, strings.Join(families, " and "))
	}
	before, _ := r.rejected.Swap(key, text)
	return before != text
}

// aboutFamilies reports whether an API server rejected a Service because of its IP families.
func aboutFamilies(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return strings.HasPrefix(c.Field, "spec.ipFamil") })
}

// shape sets the fields of svc that fed defines, and leaves the fields that the API server or others added.
func (r *Reconciler) shape(svc *corev1.Service, s *snapshot, fed offers.Federated) error {
	metav1.SetMetaDataLabel(&svc.ObjectMeta, isthmus.LabelManagedBy, v1alpha1.ManagedBy)
	metav1.SetMetaDataAnnotation(&svc.ObjectMeta, v1alpha1.MarkFederatedService, "true")
	// While a cluster is unread, or kept, the first one may be there.
	if !s.unread && slices.ContainsFunc(s.offers, func(o offers.Offer) bool { return o.Mark() == fed.First }) {
		metav1.SetMetaDataAnnotation(&svc.ObjectMeta, v1alpha1.AnnotationFirst, fed.First)
	}
	if err := r.shapeHostname(svc, s, fed); err != nil {
		return err
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

// servicePorts returns ports in the form that the API server stores.
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

// shapeFamilies requests families. The first family of an existing Service cannot change, so it stays and the others are
// added.
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
