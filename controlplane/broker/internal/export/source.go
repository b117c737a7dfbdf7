package export

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Inputs are a member's own objects of one Service. The caller owns them.
type Inputs struct {
	Export  *v1beta1.ServiceExport // nil without one
	Service *corev1.Service        // nil without one
	Slices  []discoveryv1.EndpointSlice
}

// Source has the objects of a member's cluster.
type Source interface {
	Read(context.Context, clusterset.ServiceName) (Inputs, error)
	// Exported returns the Services that have a ServiceExport.
	Exported(context.Context) ([]clusterset.ServiceName, error)
	// UpdateStatus writes the status of a ServiceExport.
	UpdateStatus(context.Context, *v1beta1.ServiceExport) error
}

// NewSource returns the Source that reads and writes a cluster by a client, which reads from the cache of a manager that Setup
// has been called with.
func NewSource(c client.Client) Source { return clusterSource{c} }

type clusterSource struct{ client client.Client }

// Read is part of Source.
func (s clusterSource) Read(ctx context.Context, name clusterset.ServiceName) (Inputs, error) {
	var in Inputs
	export, err := get[v1beta1.ServiceExport](ctx, s.client, name)
	if err != nil || export == nil || export.DeletionTimestamp != nil {
		return in, err
	}
	in.Export = export
	in.Service, err = get[corev1.Service](ctx, s.client, name)
	if err != nil || in.Service == nil {
		return in, err
	}
	var list discoveryv1.EndpointSliceList
	err = s.client.List(ctx, &list, client.InNamespace(name.Namespace), client.MatchingFields{bySlices: name.Name})
	if err != nil {
		return in, fmt.Errorf("list endpoint slices of %s: %w", name, err)
	}
	in.Slices = list.Items
	return in, nil
}

// Exported is part of Source.
func (s clusterSource) Exported(ctx context.Context) ([]clusterset.ServiceName, error) {
	var list v1beta1.ServiceExportList
	if err := s.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list ServiceExports: %w", err)
	}
	names := make([]clusterset.ServiceName, 0, len(list.Items))
	for i := range list.Items {
		if e := &list.Items[i]; e.DeletionTimestamp == nil {
			names = append(names, clusterset.ServiceName{Namespace: e.Namespace, Name: e.Name})
		}
	}
	return names, nil
}

// get reads an object of the member; nil if it does not exist.
func get[T any, P interface {
	*T
	client.Object
}](ctx context.Context, c client.Client, name clusterset.ServiceName) (*T, error) {
	obj := P(new(T))
	err := c.Get(ctx, types.NamespacedName(name), obj)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %T %s: %w", obj, name, err)
	}
	return obj, nil
}

// UpdateStatus is part of Source.
func (s clusterSource) UpdateStatus(ctx context.Context, export *v1beta1.ServiceExport) error {
	return s.client.Status().Update(ctx, export)
}
