package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	networkingv1 "k8s.io/api/networking/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// TestAgainstAPIServer runs testdata/server/*.txtar against a real API server, empty at the start of each:
// the kubeconfig "admin" reaches it as an administrator, its context "nobody" without rights. The command
// `apply FILE` writes objects unchanged, as other programs would; `object APIVERSION KIND NAMESPACE NAME` prints
// one, or fails; `lack DEFINITION FIELD` takes a field of spec out of a definition, as an older Isthmus has it.
func TestAgainstAPIServer(t *testing.T) {
	apitest.Require(t)
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "server"), Setup: startServer,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"apply": applyObjects, "object": printObject, "lack": lackField},
	})
	conformance.Holds(t, "V35")
}

// admin returns an administrator's client of a script's server.
func admin(ts *testscript.TestScript) client.Client {
	t := target{kubeconfig: ts.MkAbs("admin"), timeout: defaultTimeout}
	c, err := t.connect()
	ts.Check(err)
	return c
}

func applyObjects(ts *testscript.TestScript, _ bool, args []string) {
	c := admin(ts)
	for doc := range strings.SplitSeq(ts.ReadFile(args[0]), "\n---\n") {
		want := &unstructured.Unstructured{}
		ts.Check(yaml.Unmarshal([]byte(doc), &want.Object))
		have := want.DeepCopy()
		err := c.Create(context.Background(), have)
		if apierrors.IsAlreadyExists(err) {
			ts.Check(c.Get(context.Background(), client.ObjectKeyFromObject(want), have))
			want.SetResourceVersion(have.GetResourceVersion())
			have, err = want, c.Update(context.Background(), want.DeepCopy())
		}
		ts.Check(err)
		if want.GetKind() == "CustomResourceDefinition" {
			ts.Check(awaitDefinition(c, want.GetName()))
		}
		if status, ok := want.Object["status"]; ok {
			ts.Check(c.Get(context.Background(), client.ObjectKeyFromObject(want), have))
			have.Object["status"] = status
			ts.Check(c.Status().Update(context.Background(), have))
		}
	}
}

// awaitDefinition waits until the API server serves a definition.
func awaitDefinition(c client.Client, name string) error {
	return wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		err := c.Get(ctx, client.ObjectKey{Name: name}, crd)
		return slices.ContainsFunc(crd.Status.Conditions, func(c apiextensionsv1.CustomResourceDefinitionCondition) bool {
			return c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
		}), err
	})
}

func printObject(ts *testscript.TestScript, neg bool, args []string) {
	o := &unstructured.Unstructured{}
	o.SetAPIVersion(args[0])
	o.SetKind(args[1])
	err := admin(ts).Get(context.Background(), client.ObjectKey{Namespace: args[2], Name: args[3]}, o)
	if neg {
		if !apierrors.IsNotFound(err) {
			ts.Fatalf("%s %s/%s exists, or cannot be read: %v", args[1], args[2], args[3], err)
		}
		return
	}
	ts.Check(err)
	o.SetManagedFields(nil)
	text, err := yaml.Marshal(o.Object)
	ts.Check(err)
	_, err = ts.Stdout().Write(text)
	ts.Check(err)
}

func lackField(ts *testscript.TestScript, _ bool, args []string) {
	c, crd := admin(ts), &apiextensionsv1.CustomResourceDefinition{}
	ts.Check(c.Get(context.Background(), client.ObjectKey{Name: args[0]}, crd))
	for i := range crd.Spec.Versions {
		delete(crd.Spec.Versions[i].Schema.OpenAPIV3Schema.Properties["spec"].Properties, args[1])
	}
	ts.Check(c.Update(context.Background(), crd))
}

func startServer(script *testscript.Env) error {
	cfg, stop, err := apitest.Empty(context.Background())
	if err != nil {
		return err
	}
	if err := awaitServiceCIDR(cfg); err != nil {
		return errors.Join(err, stop())
	}
	script.Defer(func() {
		if err := stop(); err != nil {
			script.T().Fatal(err)
		}
	})
	return writeKubeconfig(cfg, filepath.Join(script.WorkDir, "admin"))
}

// writeKubeconfig writes a kubeconfig for a server, with the contexts admin, which is the current one, and nobody.
func writeKubeconfig(cfg *rest.Config, path string) error {
	return clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: cfg.Host, CertificateAuthorityData: cfg.CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{
			"admin":  {Token: cfg.BearerToken},
			"nobody": {Token: cfg.BearerToken, Impersonate: "nobody"},
		},
		Contexts: map[string]*clientcmdapi.Context{
			"admin": {Cluster: "c", AuthInfo: "admin"}, "nobody": {Cluster: "c", AuthInfo: "nobody"},
		},
		CurrentContext: "admin",
	}, path)
}

// awaitServiceCIDR waits for what an API server makes soon after its start.
func awaitServiceCIDR(cfg *rest.Config) error {
	c, err := connect(rest.CopyConfig(cfg))
	if err != nil {
		return err
	}
	return wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		services := &networkingv1.ServiceCIDRList{}
		err := c.List(ctx, services)
		return len(services.Items) > 0, err
	})
}
