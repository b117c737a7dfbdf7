package membership

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var brokerServer, memberServer, otherServer apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &brokerServer, &memberServer, &otherServer))
}

func newClient(t testing.TB, cfg *rest.Config) client.Client {
	t.Helper()
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// deploy deploys a broker that admits any cluster in a namespace of the test.
func deploy(t *testing.T, b Broker) (BrokerInfo, client.Client) {
	t.Helper()
	cfg := brokerServer.Config(t)
	asAdmin := newClient(t, cfg)
	b.Server, b.CA, b.TokenTTL, b.AdmitAnyCluster = cfg.Host, cfg.CAData, time.Hour, true
	d, err := DeployBroker(t.Context(), asAdmin, b)
	if err != nil {
		t.Fatal(err)
	}
	return d.Info, asAdmin
}

// awaitPolicies waits until the API server enforces the policies of a new broker, given a client with a broker-info file.
func awaitPolicies(t *testing.T, joining client.Client, namespace string) {
	t.Helper()
	err := admin.Await(t.Context(), "the policies are not in effect", func() (bool, error) {
		odd := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "odd"}}
		err := joining.Create(t.Context(), odd, client.DryRunAll)
		if apierrors.IsForbidden(err) {
			return true, nil
		}
		return false, err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// request returns a Request to join the broker of info, with addresses that depend on n.
func request(info BrokerInfo, id clusterset.ClusterID, n int) Request {
	return Request{
		ClusterID: id, Broker: info, Namespace: fmt.Sprintf("%s-%s", info.Namespace, strings.ReplaceAll(string(id), ".", "-")),
		Addresses: Addresses{
			Pods:     cidrs(fmt.Sprintf("10.%d.0.0/16", n)),
			Nodes:    cidrs(fmt.Sprintf("192.0.2.%d/32", n)),
			Services: cidrs("10.96.0.0/12"),
		},
	}
}

// cluster returns an administrator's client of a cluster without ClusterProperties. At its end the test removes the
// cluster-scoped objects of its joins.
func cluster(t *testing.T, s *apitest.Server) client.Client {
	t.Helper()
	c := newClient(t, s.Config(t))
	t.Cleanup(func() {
		if err := clearProperties(context.Background(), c); err != nil {
			t.Errorf("clear the cluster: %v", err)
		}
	})
	return c
}

// reserve registers a cluster on the broker and does nothing else.
func reserve(t *testing.T, broker client.Client, uid string, r Request) (Joined, error) {
	t.Helper()
	config, err := readConfig(t.Context(), broker, r.Broker.Namespace)
	if err != nil {
		t.Error(err)
		return Joined{}, err
	}
	var j Joined
	_, err = r.register(t.Context(), broker, config, uid, discovery{}, &j)
	return j, err
}

// invite returns an invitation to the broker of info.
func invite(t *testing.T, asAdmin client.Client, info BrokerInfo, id clusterset.ClusterID) BrokerInfo {
	t.Helper()
	invited, err := Invite(t.Context(), asAdmin, Invitation{Namespace: info.Namespace, ClusterID: id, TTL: time.Hour, Server: info.Server, CA: info.CA})
	if err != nil {
		t.Fatal(err)
	}
	return invited
}

// credentials returns the credentials in a member's Secret, as the kubelet mounts them.
func credentials(t *testing.T, member client.Client, namespace string) *rest.Config {
	t.Helper()
	secret := &corev1.Secret{}
	if err := member.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: v1alpha1.BrokerSecret}, secret); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	mount(t, dir, secret)
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: dir + "/" + v1alpha1.BrokerSecretKubeconfig}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// mount writes the values of a Secret into files.
func mount(t *testing.T, dir string, secret *corev1.Secret) {
	t.Helper()
	for key, value := range secret.Data {
		if err := os.WriteFile(dir+"/"+key, value, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
