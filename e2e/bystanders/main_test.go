package bystanders

import (
	"os"
	"testing"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// servers are the API servers of the broker and the members.
var servers struct{ broker, east, north, west apitest.Server }

var scheme = runtime.NewScheme()

// withServers runs the tests beside the API servers.
type withServers struct{ *testing.M }

func (m withServers) Run() int {
	return apitest.Run(m.M, &servers.broker, &servers.east, &servers.north, &servers.west)
}

func TestMain(m *testing.M) {
	for _, add := range []func(*runtime.Scheme) error{
		admissionv1.AddToScheme, coordinationv1.AddToScheme, corev1.AddToScheme, discoveryv1.AddToScheme, eventsv1.AddToScheme,
		rbacv1.AddToScheme, v1alpha1.AddToScheme, v1beta1.Install,
	} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(netlab.Main(withServers{m}))
}
