package imports

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/apply"
)

// Reasons of events: on a ServiceImport that prevents an import, and on one of Isthmus that lacks endpoints because an
// EndpointSlice of another controller has the name of its slice.
const (
	reasonForeignImport = "ForeignServiceImport"
	reasonForeignSlice  = "ForeignEndpointSlice"
)

var foreignCount = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "isthmus_controller_foreign_imports",
	Help: "Services that are not imported because another controller's ServiceImport has their name; events on those ServiceImports name them.",
})

func init() { metrics.Registry.MustRegister(foreignCount) }

// foreignImports are the Services that are not imported because a ServiceImport of another controller has their name, with
// its UID. Safe for concurrent use.
type foreignImports struct {
	mu   sync.Mutex
	uids map[clusterset.ServiceName]types.UID
}

// found records the ServiceImport of another controller, and calls report if it is new.
func (f *foreignImports) found(name clusterset.ServiceName, uid types.UID, report func(clusterset.ServiceName, types.UID)) {
	f.mu.Lock()
	known := f.uids[name] == uid
	if f.uids == nil {
		f.uids = map[clusterset.ServiceName]types.UID{}
	}
	if _, ok := f.uids[name]; !ok {
		foreignCount.Inc()
	}
	f.uids[name] = uid
	f.mu.Unlock()
	if !known {
		report(name, uid)
	}
}

// resolved records that no ServiceImport of another controller prevents the import of a Service.
func (f *foreignImports) resolved(name clusterset.ServiceName) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.uids[name]; ok {
		delete(f.uids, name)
		foreignCount.Dec()
	}
}

// reportForeign logs a ServiceImport of another controller, and sends an event on it.
func (r *Reconciler) reportForeign(name clusterset.ServiceName, uid types.UID) {
	r.Log.Error("a service is not imported because another controller's ServiceImport has its name; delete that, or unexport the service in the other clusters",
		"namespace", name.Namespace, "service", name.Name)
	r.warn(name, uid, reasonForeignImport,
		"clusters of the ClusterSet export service %s, which Isthmus does not import: this ServiceImport is not its own, and it leaves it alone; the import resumes when it is deleted", name.Name)
}

// createSlice creates an imported slice by apply.Create, which leaves a slice of another controller alone.
func createSlice(ctx context.Context, c client.Client, obj client.Object, keep ...string) error {
	return apply.Create(ctx, c, obj, func(existing client.Object) error {
		managedBy := existing.GetLabels()[discoveryv1.LabelManagedBy]
		if managedBy == v1alpha1.ManagedBy || sameOwner(existing.GetOwnerReferences(), obj.GetOwnerReferences()) {
			return nil
		}
		return &foreignSliceError{obj.GetName(), managedBy}
	}, keep...)
}

// foreignSliceError says that another controller's EndpointSlice has the name of an imported one.
type foreignSliceError struct{ slice, managedBy string }

func (e *foreignSliceError) Error() string {
	return fmt.Sprintf("EndpointSlice %s belongs to another controller, and is left alone: it is managed by %q; delete it", e.slice, e.managedBy)
}

// reportForeignSlice sends an event on the ServiceImport of a slice if err is a foreignSliceError. Repeated events are counted
// in one.
func (r *Reconciler) reportForeignSlice(es *discoveryv1.EndpointSlice, err error) {
	if foreign := (*foreignSliceError)(nil); !errors.As(err, &foreign) || len(es.OwnerReferences) == 0 {
		return
	}
	owner := es.OwnerReferences[0]
	r.warn(clusterset.ServiceName{Namespace: es.Namespace, Name: owner.Name}, owner.UID, reasonForeignSlice,
		"endpoints of cluster %s are missing: %v", sourceOf(es), err)
}

// warn sends a warning event on the ServiceImport with a UID.
func (r *Reconciler) warn(name clusterset.ServiceName, uid types.UID, reason, note string, args ...any) {
	r.Events.Eventf(&v1beta1.ServiceImport{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1beta1.SchemeGroupVersion.String(), Kind: v1beta1.ServiceImportKindName},
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: uid},
	}, nil, corev1.EventTypeWarning, reason, "Import", note, args...)
}

// sameOwner reports whether the first owners are the same object.
func sameOwner(a, b []metav1.OwnerReference) bool {
	return len(a) > 0 && len(b) > 0 && a[0].UID == b[0].UID
}
