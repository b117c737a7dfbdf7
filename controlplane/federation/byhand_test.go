package federation_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/bootstrap"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/documents"
)

// kubeconfig writes a kubeconfig with an administrator's context for each server, and returns its path.
func kubeconfig(t *testing.T) string {
	t.Helper()
	config := clientcmdapi.NewConfig()
	for _, id := range ids {
		cfg, name := servers[id].Config(t), string(id)
		config.Clusters[name] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
		config.AuthInfos[name] = &clientcmdapi.AuthInfo{ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData, Token: cfg.BearerToken}
		config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// withoutParameters leaves out what stays in any cluster that was a member once.
func withoutParameters(objects []client.Object) []client.Object {
	return slices.DeleteFunc(objects, admission.IsParameters)
}

// The commands of docs/federation-by-hand.md form a federation that works and is fenced.
func TestFormedByHand(t *testing.T) {
	w := newTestbed(t)
	w.end() // only what users have is there
	for _, id := range ids {
		for _, o := range slices.Concat(withoutParameters(bootstrap.MemberObjects(namespace, id)), bootstrap.AccountObjects(namespace, "a", "x"), bootstrap.AccountObjects(namespace, "b", "x")) {
			if err := w.admin[id].Delete(t.Context(), o); client.IgnoreNotFound(err) != nil {
				t.Fatal(err)
			}
		}
		w.furnish(id)
	}
	page, err := documents.Read("../../docs/federation-by-hand.md")
	if err != nil {
		t.Fatal(err)
	}
	config, assets := kubeconfig(t), os.Getenv("KUBEBUILDER_ASSETS")
	page = slices.DeleteFunc(page, func(b documents.Block) bool { return b.Language != "sh" })
	if len(page) != 5 {
		t.Fatalf("the page has %d blocks of commands", len(page))
	}
	for _, block := range page {
		cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", block.Text)
		cmd.Dir = "../.."
		cmd.Env = append(os.Environ(), "KUBECONFIG="+config, "PATH="+assets+":"+os.Getenv("PATH"))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s\n%s", err, block.Text, out)
		}
	}
	for _, id := range ids[:2] {
		w.edit(id, func(spec *federationv1alpha1.FederationSpec) {
			spec.Grants = []federationv1alpha1.Grant{{Namespaces: []federationv1alpha1.Pattern{demo}, GlobalServices: []federationv1alpha1.Pattern{"*"}}}
		})
	}
	w.supervise("a", "one")
	w.supervise("b", "two")
	w.offer("a", "web", "10.1.0.1")
	w.offer("c", "web", "10.3.0.1")
	w.awaitEverywhere("web", "10.1.0.1", "10.3.0.1")
	await.True(t, "nothing is wrong", func() bool {
		for _, id := range ids {
			if m := w.status("a", id); !m.Reachable || m.Leader == "" || m.Message != "" {
				return false
			}
		}
		return w.condition("a", federationv1alpha1.ConditionSettingsDiffer).Type == ""
	})

	// A supervisor that does not lead c, or a thief of its token, writes nothing there, and nobody changes an id in use.
	for _, supervisor := range ids[:2] {
		secret := &corev1.Secret{}
		if err := w.admin[supervisor].Get(t.Context(), client.ObjectKey{Namespace: federationv1alpha1.SecretNamespace, Name: "federation-c"}, secret); err != nil {
			t.Fatal(err)
		}
		admin := servers["c"].Config(t)
		stolen, err := client.New(&rest.Config{Host: admin.Host, TLSClientConfig: rest.TLSClientConfig{CAData: admin.CAData}, BearerToken: string(secret.Data["token"])}, client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		err = stolen.Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: demo, Name: "stolen", Annotations: map[string]string{federationv1alpha1.AnnotationEpoch: "99"}},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}, ExternalIPs: []string{"192.0.2.1"}},
		})
		if !apierrors.IsForbidden(err) || !strings.Contains(fmt.Sprint(err), "isthmus-federation-") {
			t.Errorf("a token of %s writes into c: %v", supervisor, err)
		}
	}
	claim := &federationv1alpha1.ClusterClaim{}
	if err := w.admin["c"].Get(t.Context(), client.ObjectKey{Name: "id.k8s.io"}, claim); err != nil {
		t.Fatal(err)
	}
	claim.Spec.Value = "d"
	if err := w.admin["c"].Update(t.Context(), claim); err == nil || !strings.Contains(err.Error(), "the Federation of this cluster refers to it") {
		t.Error(errors.Join(errors.New("the id of c was changed"), err))
	}

	// isthmusctl goes on with it.
	if err := w.form(w.clusters(ids...)...); err == nil || !strings.Contains(err.Error(), "belongs to the federation prod") {
		t.Errorf("a federation of another name: %v", err)
	}
	conformance.Holds(t, "F1", "F8")
}
