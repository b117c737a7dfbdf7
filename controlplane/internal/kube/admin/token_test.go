package admin

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/apitest"
)

// An API server refuses tokens until its admission knows the kind of a policy's parameter. Any other refusal is final.
func TestRequestTokenWhilePoliciesAreNew(t *testing.T) {
	learning := apierrors.NewForbidden(corev1.Resource("serviceaccounts"), "isthmus-join",
		errors.New("failed to configure binding: paramKind kind Member not yet synced to use for admission"))
	learning.ErrStatus.Reason, learning.ErrStatus.Code = metav1.StatusReasonInvalid, http.StatusUnprocessableEntity
	final := apierrors.NewForbidden(corev1.Resource("serviceaccounts"), "isthmus-join", errors.New("denied request"))
	for name, c := range map[string]struct {
		refused int
		err     error
		tries   int
		want    string // "" means a token
	}{
		"at once":         {0, nil, 1, ""},
		"after a while":   {3, learning, 4, ""},
		"never":           {1 << 20, learning, 600, "not yet synced"},
		"another refusal": {1, final, 1, "denied request"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tries := 0
				server := interceptor.NewClient(fake.NewFakeClient(), interceptor.Funcs{
					SubResourceCreate: func(_ context.Context, _ client.Client, _ string, _, into client.Object, _ ...client.SubResourceCreateOption) error {
						if tries++; tries <= c.refused {
							return c.err
						}
						into.(*authenticationv1.TokenRequest).Status.Token = "token" //nolint:forcetypeassert // RequestToken says so
						return nil
					},
				})
				token, _, err := RequestToken(t.Context(), server, types.NamespacedName{Namespace: "isthmus-broker", Name: "isthmus-join"}, time.Hour, "")
				if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || err == nil && token != "token" {
					t.Errorf("%q, %v", token, err)
				}
				if tries < c.tries || tries > c.tries+1 {
					t.Errorf("%d tries, want %d", tries, c.tries)
				}
			})
		})
	}
}

// A real API server refuses in the same way, until it has learned the kind of a new policy's parameter.
func TestRequestTokenUnderANewPolicy(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), apiextensionsv1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(apitest.StartEmpty(t), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	create := func(obj client.Object, fields string) {
		t.Helper()
		if err := yaml.UnmarshalStrict([]byte(fields), obj); err != nil {
			t.Fatal(err)
		}
		if err := c.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	account := types.NamespacedName{Namespace: "default", Name: "reader"}
	create(&corev1.ServiceAccount{}, `{metadata: {namespace: default, name: reader}}`)
	create(&admissionv1.ValidatingAdmissionPolicy{}, `
metadata: {name: tokens}
spec:
  paramKind: {apiVersion: test.isthmus.dev/v1, kind: Limit}
  matchConstraints: {resourceRules: [{apiGroups: [""], apiVersions: [v1], resources: [serviceaccounts/token], operations: [CREATE]}]}
  validations: [{expression: "params.metadata.name != request.name"}]
`)
	create(&admissionv1.ValidatingAdmissionPolicyBinding{}, `
metadata: {name: tokens}
spec: {policyName: tokens, paramRef: {selector: {}, parameterNotFoundAction: Allow}, validationActions: [Deny]}
`)
	if err := Await(t.Context(), "the policy is not in effect", func() (bool, error) {
		of := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: account.Namespace, Name: account.Name}}
		err := c.SubResource("token").Create(t.Context(), of, TokenRequest(time.Hour, ""))
		if err == nil || isLearning(err) {
			return err != nil, nil
		}
		return false, err
	}); err != nil {
		t.Fatal(err)
	}
	create(&apiextensionsv1.CustomResourceDefinition{}, `
metadata: {name: limits.test.isthmus.dev}
spec:
  group: test.isthmus.dev
  names: {kind: Limit, plural: limits}
  scope: Cluster
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
`)
	if token, _, err := RequestToken(t.Context(), c, account, time.Hour, ""); err != nil || token == "" {
		t.Errorf("%q, %v", token, err)
	}
}
