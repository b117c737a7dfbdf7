package membership

import (
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// deploy-broker grants the rights of the quota controller always, and runs it only if an image is given; a later run keeps it. none
// removes it with the list that it wrote.
func TestDeployQuotaController(t *testing.T) {
	const namespace = "quota-controller"
	_, c := deploy(t, Broker{Namespace: namespace})
	key := client.ObjectKey{Namespace: namespace, Name: v1alpha1.QuotaController}
	if err := c.Get(t.Context(), key, &corev1.ServiceAccount{}); err != nil {
		t.Error(err)
	}
	if err := c.Get(t.Context(), key, &appsv1.Deployment{}); !apierrors.IsNotFound(err) {
		t.Errorf("without an image there is a Deployment, or no answer: %v", err)
	}
	for _, image := range []string{"isthmus/controller:v1", "", "isthmus/controller:v2"} {
		deploy(t, Broker{Namespace: namespace, QuotaController: image})
		d := &appsv1.Deployment{}
		if err := c.Get(t.Context(), key, d); err != nil {
			t.Fatal(err)
		}
		container := d.Spec.Template.Spec.Containers[0]
		if want := "isthmus/controller:v1"; image != "isthmus/controller:v2" && container.Image != want {
			t.Errorf("after %q the image is %s, want %s", image, container.Image, want)
		}
		if have := strings.Join(container.Args, " "); have != "--quota-controller --namespace="+namespace || d.Spec.Template.Spec.ServiceAccountName != v1alpha1.QuotaController {
			t.Errorf("it runs with %s as %s", have, d.Spec.Template.Spec.ServiceAccountName)
		}
		if ports := container.Ports; len(ports) != 1 || ports[0].ContainerPort != v1alpha1.ControllerPort || ports[0].Name != container.ReadinessProbe.HTTPGet.Port.StrVal {
			t.Errorf("probes and Prometheus ask at %+v", ports)
		}
	}
	for _, tt := range []struct{ given, want []string }{{[]string{"pull", "more"}, []string{"pull", "more"}}, {nil, []string{"pull", "more"}}, {[]string{}, nil}} {
		deploy(t, Broker{Namespace: namespace, QuotaController: "isthmus/controller:v2", PullSecrets: tt.given})
		if have := pullSecrets(t, c, key); !slices.Equal(have, tt.want) {
			t.Errorf("given the pull secrets %q it has %q, want %q", tt.given, have, tt.want)
		}
	}
	config := &v1alpha1.ClusterSetConfig{}
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: v1alpha1.ClusterSetConfigName}, config); err != nil {
		t.Fatal(err)
	}
	config.Status.OverQuota = []v1alpha1.OverQuota{{Member: "a", Kind: "services", Used: 2, Limit: 1, Since: metav1.Now()}}
	if err := c.Status().Update(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	over := func(want int, wantRunning bool) {
		t.Helper()
		all, running, err := OverQuota(t.Context(), c, namespace)
		if err != nil || len(all["a"]) != want || running != wantRunning {
			t.Errorf("over quota: %v, running %v, %v", all, running, err)
		}
	}
	over(1, false)
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.QuotaController},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: new("pod"), RenewTime: new(metav1.NowMicro())},
	}
	if err := c.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	over(1, true)
	lease.Spec.RenewTime = new(metav1.NewMicroTime(time.Now().Add(-5 * time.Minute)))
	if err := c.Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	over(1, false)
	deploy(t, Broker{Namespace: namespace}) // keeps the status
	over(1, false)
	deploy(t, Broker{Namespace: namespace, QuotaController: NoQuotaController})
	over(0, false)
	if err := c.Get(t.Context(), key, &appsv1.Deployment{}); !apierrors.IsNotFound(err) {
		t.Errorf("none left a Deployment: %v", err)
	}
}

// pullSecrets returns the names of the Secrets with which a Deployment's image is pulled.
func pullSecrets(t *testing.T, c client.Client, key client.ObjectKey) []string {
	t.Helper()
	d := &appsv1.Deployment{}
	if err := c.Get(t.Context(), key, d); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range d.Spec.Template.Spec.ImagePullSecrets {
		names = append(names, r.Name)
	}
	return names
}
