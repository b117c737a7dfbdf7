package hostile

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// memberKinds returns the kinds of a member on the broker. Its admission policies hold.
func memberKinds() []Kind {
	return []Kind{
		kindOf("ExportRecord", Member, record, recordTwists()...),
		kindOf("EndpointSlice", Member, brokerSlice, append(sliceTwists(), brokerSliceTwists()...)...),
		kindOf("aggregate", Member, aggregate, aggregateTwists()...),
		kindOf("Lease", Member, lease, leaseTwists()...),
	}
}

// Record returns the record that a member writes when it exports a Service with port http/80.
func (s Scene) Record(service string) *v1alpha1.ExportRecord {
	r := mcs.ExportRecord(clusterset.Export{
		Cluster: clusterset.ClusterID(s.Member), Service: clusterset.ServiceName{Namespace: s.Namespace, Name: service},
		ExportedAt: s.Now, Type: clusterset.ClusterSetIP, Families: []clusterset.Family{clusterset.IPv4}, WantsIP: clusterset.Enabled,
		Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	})
	r.Namespace = s.Broker
	return r
}

// Slice returns the slice of a member with one endpoint of a Service.
func (s Scene) Slice(service, address string) *discoveryv1.EndpointSlice {
	source := newSlice(metav1.ObjectMeta{Namespace: s.Namespace, Name: service + "-x7k2p"}, address)
	source.Labels = map[string]string{discoveryv1.LabelServiceName: service}
	es := mcs.BrokerSlice(source, clusterset.ClusterID(s.Member))
	es.Namespace = s.Broker
	return es
}

// Aggregate returns the aggregate of a Service with ClusterSetIPs that the member allocated.
func (s Scene) Aggregate(service string, ips ...netip.Addr) *v1beta1.ServiceImport {
	a := clusterset.Aggregate{
		Service: clusterset.ServiceName{Namespace: s.Namespace, Name: service}, Type: clusterset.ClusterSetIP, IPs: ips,
	}
	if len(ips) > 0 {
		a.AllocatedBy = clusterset.ClusterID(s.Member)
	}
	si := mcs.Aggregate(a)
	si.Namespace = s.Broker
	metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationCreatedBy, s.Member)
	return si
}

// pod returns the address of a pod of the hostile member.
func (s *Source) pod() string { return s.within(s.Pods[s.Member][0]).String() }

func record(s *Source) (*v1alpha1.ExportRecord, []client.Object) {
	s.place = Place{}
	name := s.service()
	return s.Record(name), []client.Object{s.Slice(name, s.pod())}
}

func brokerSlice(s *Source) (*discoveryv1.EndpointSlice, []client.Object) {
	s.place = Place{}
	name := s.service()
	return s.Slice(name, s.pod()), []client.Object{s.Record(name)}
}

func aggregate(s *Source) (*v1beta1.ServiceImport, []client.Object) {
	s.place = Place{}
	if s.oneIn(3) { // without a record, the member does not export the Service
		return s.Aggregate(Pick(s, s.Next, s.fresh()), s.within(s.Block)), nil
	}
	name := s.service()
	return s.Aggregate(name, s.within(s.Block)), []client.Object{s.Record(name)}
}

func lease(s *Source) (*coordinationv1.Lease, []client.Object) {
	s.place = Place{}
	now := metav1.NewMicroTime(s.Now)
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Broker, Name: v1alpha1.MemberLease(s.Member)},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: new(s.Member), RenewTime: &now, LeaseDurationSeconds: new(int32(30))},
	}, nil
}

func recordTwists() []func(*Source, *v1alpha1.ExportRecord) {
	return []func(*Source, *v1alpha1.ExportRecord){
		Metadata[*v1alpha1.ExportRecord],
		func(s *Source, r *v1alpha1.ExportRecord) { r.Spec.ExportedAt = s.Time() },
		func(s *Source, r *v1alpha1.ExportRecord) { // the oldest export decides
			r.Spec.ExportedAt = metav1.NewTime(time.Unix(1, 0))
			twistSpec(s, &r.Spec.Import)
		},
		func(s *Source, r *v1alpha1.ExportRecord) {
			r.Spec.ExportedAt = metav1.NewTime(time.Unix(1, 0))
			r.Spec.ExportedAnnotations = s.Weights()
		},
		func(s *Source, r *v1alpha1.ExportRecord) { r.Spec.ServiceLabels = s.Map(0) },
		func(s *Source, r *v1alpha1.ExportRecord) {
			r.Spec.ServiceLabels = map[string]string{s.Key(): s.Value()}
		},
		func(s *Source, r *v1alpha1.ExportRecord) {
			r.Spec.ServiceLabels = map[string]string{}
			for i := range 2000 {
				r.Spec.ServiceLabels[fmt.Sprintf("example.org/label-%d", i)] = "x"
			}
		},
		func(s *Source, r *v1alpha1.ExportRecord) { r.Spec.ExportedLabels = s.Map(0) },
		func(s *Source, r *v1alpha1.ExportRecord) { r.Spec.ExportedAnnotations = s.Map(260 << 10) },
		func(s *Source, r *v1alpha1.ExportRecord) {
			r.Spec.IPs = []string{s.Address(s.Member), s.Address(s.Member)}[:1+s.IntN(2)]
		},
		func(s *Source, r *v1alpha1.ExportRecord) {
			r.Spec.UseClusterSetIP, r.Spec.AgreedClusterSetIP = new(s.oneIn(2)), new(s.oneIn(2))
		},
		func(s *Source, r *v1alpha1.ExportRecord) { r.Spec.WithdrawnAt = new(s.Time()) },
		func(s *Source, r *v1alpha1.ExportRecord) { r.Spec.Import.Ports = s.importPorts() },
		func(s *Source, r *v1alpha1.ExportRecord) { twistSpec(s, &r.Spec.Import) },
		func(s *Source, r *v1alpha1.ExportRecord) { r.Spec.ClusterID = Pick(s, s.Others...) },
		func(s *Source, r *v1alpha1.ExportRecord) {
			r.Spec.Namespace = Pick(s, "kube-system", s.Broker, "nowhere", "a.b")
			r.Name = mcs.RecordName(clusterset.ClusterID(s.Member), clusterset.ServiceName{Namespace: r.Spec.Namespace, Name: r.Spec.Name})
			r.Labels[v1alpha1.LabelServiceNamespace] = r.Spec.Namespace
		},
	}
}

func brokerSliceTwists() []func(*Source, *discoveryv1.EndpointSlice) {
	return []func(*Source, *discoveryv1.EndpointSlice){
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Labels[v1alpha1.LabelCluster] = Pick(s, s.Others...)
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Annotations = map[string]string{v1alpha1.AnnotationChangedAt: Pick(s, "0", "-1", "9223372036854775807", "soon")}
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Annotations = map[string]string{v1alpha1.AnnotationRegions: Pick(s, "zone-1=region-1", "="+s.Value(), "a,b", strings.Repeat("z=r,", 2000))}
		},
		func(s *Source, es *discoveryv1.EndpointSlice) {
			es.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{Pick(s, s.Foreign...).String()}}}
		},
	}
}

func aggregateTwists() []func(*Source, *v1beta1.ServiceImport) {
	return []func(*Source, *v1beta1.ServiceImport){
		Metadata[*v1beta1.ServiceImport],
		func(s *Source, si *v1beta1.ServiceImport) { si.Spec.IPs = []string{s.Address(s.Member)} },
		func(s *Source, si *v1beta1.ServiceImport) {
			si.Spec.IPs = nil
			delete(si.Annotations, v1alpha1.AnnotationAllocatedBy)
			si.Annotations[v1alpha1.AnnotationUseClusterSetIP] = Pick(s, "false", "true", "yes")
		},
		func(s *Source, si *v1beta1.ServiceImport) {
			si.Annotations = merged(si.Annotations, map[string]string{v1alpha1.AnnotationAllocatedBy: Pick(s, s.Others...)})
		},
		func(s *Source, si *v1beta1.ServiceImport) {
			si.Annotations = merged(si.Annotations, map[string]string{v1alpha1.AnnotationExtendedBy: Pick(s, append([]string{s.Member}, s.Others...)...)})
		},
		func(s *Source, si *v1beta1.ServiceImport) {
			si.Annotations[v1alpha1.AnnotationCreatedBy] = Pick(s, append([]string{"", "stranger"}, s.Others...)...)
		},
		func(s *Source, si *v1beta1.ServiceImport) { si.Spec.Ports = s.importPorts() },
		func(s *Source, si *v1beta1.ServiceImport) { twistSpec(s, &si.Spec) },
	}
}

func leaseTwists() []func(*Source, *coordinationv1.Lease) {
	return []func(*Source, *coordinationv1.Lease){
		Metadata[*coordinationv1.Lease],
		func(s *Source, l *coordinationv1.Lease) { l.Spec.RenewTime = new(metav1.NewMicroTime(s.Time().Time)) },
		func(s *Source, l *coordinationv1.Lease) { l.Spec.AcquireTime = new(metav1.NewMicroTime(s.Time().Time)) },
		func(s *Source, l *coordinationv1.Lease) {
			l.Spec.LeaseDurationSeconds = new(Pick(s, int32(1), math.MaxInt32, 0, -1))
		},
		func(s *Source, l *coordinationv1.Lease) { l.Spec.HolderIdentity = new(s.Value()) },
		func(s *Source, l *coordinationv1.Lease) { l.Name = v1alpha1.MemberLease(Pick(s, s.Others...)) },
	}
}
