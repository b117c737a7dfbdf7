package services

import (
	"bytes"
	"compress/flate"
	"fmt"
	"io"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// typical is the preset dictionary of deflate: the content that most objects share. Matches near its end are the shortest.
var typical = sync.OnceValue(func() []byte {
	yes, no := true, false
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Labels: map[string]string{discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io", discoveryv1.LabelServiceName: ""}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}
	for range 2 { // one endpoint follows another
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{"10.0.0.1"}, NodeName: new("node-1"), Zone: new("zone-1"),
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
		})
	}
	service := func(meta metav1.ObjectMeta) *corev1.Service {
		return &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}}, Selector: map[string]string{"app": ""},
			ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, Type: corev1.ServiceTypeClusterIP, SessionAffinity: corev1.ServiceAffinityNone,
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: new(corev1.IPFamilyPolicySingleStack),
			InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster),
		}}
	}
	var all []byte
	for _, o := range []interface{ Marshal() ([]byte, error) }{
		service(metav1.ObjectMeta{Labels: map[string]string{labelMemberOf: ""}, Annotations: map[string]string{v1alpha1.AnnotationService: "", v1alpha1.AnnotationServiceStatus: ""}}),
		service(metav1.ObjectMeta{Labels: map[string]string{isthmus.LabelManagedBy: v1alpha1.ManagedBy}, Annotations: map[string]string{v1alpha1.MarkFederatedService: "true"}}),
		slice,
	} {
		data, err := o.Marshal()
		if err != nil {
			panic(fmt.Sprintf("encode %T: %v", o, err))
		}
		all = append(all, data...)
	}
	return all
})

// deflater is the state of deflate. It takes a megabyte, so there is one.
var deflater struct {
	sync.Mutex

	w   *flate.Writer
	out bytes.Buffer
}

// deflate compresses data (RFC 1951).
func deflate(data []byte) string {
	d := &deflater
	d.Lock()
	defer d.Unlock()
	d.out.Reset()
	if d.w == nil {
		var err error
		if d.w, err = flate.NewWriterDict(&d.out, flate.DefaultCompression, typical()); err != nil {
			panic(err) // the level is valid
		}
	} else {
		d.w.Reset(&d.out)
	}
	_, _ = d.w.Write(data) // a buffer does not fail
	_ = d.w.Close()
	return d.out.String()
}

// inflater is the state of inflate.
type inflater struct {
	in  strings.Reader
	r   io.Reader
	out bytes.Buffer
}

var inflaters = sync.Pool{New: func() any {
	i := new(inflater)
	i.r = flate.NewReaderDict(&i.in, typical())
	return i
}}

// inflate calls use with decompressed data, which is valid until use returns.
func inflate(s string, use func([]byte) error) error {
	i := inflaters.Get().(*inflater) //nolint:forcetypeassert // nothing else is put in
	defer inflaters.Put(i)
	i.in.Reset(s)
	if err := i.r.(flate.Resetter).Reset(&i.in, typical()); err != nil { //nolint:forcetypeassert // documented
		return err
	}
	i.out.Reset()
	if _, err := i.out.ReadFrom(i.r); err != nil {
		return err
	}
	return use(i.out.Bytes())
}
