package apitest

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// IssueTokens plays the controller that puts tokens into Secrets, which these servers lack, until ctx is done: each
// Secret of namespace ("" is all) that asks for a token of a ServiceAccount gets one that dies with the Secret. The
// tokens are real.
func IssueTokens(ctx context.Context, admin client.Client, namespace string) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		secrets := &corev1.SecretList{}
		if err := admin.List(ctx, secrets, client.InNamespace(namespace)); err != nil {
			continue // at the end
		}
		for i := range secrets.Items {
			if err := issue(ctx, admin, &secrets.Items[i]); err != nil {
				return err
			}
		}
	}
}

// issue puts a token into one Secret that asks for one. What was deleted or changed meanwhile is no error.
func issue(ctx context.Context, admin client.Client, s *corev1.Secret) error {
	if s.Type != corev1.SecretTypeServiceAccountToken || len(s.Data[corev1.ServiceAccountTokenKey]) > 0 {
		return nil
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: s.Name, UID: s.UID},
	}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Annotations[corev1.ServiceAccountNameKey]}}
	err := admin.SubResource("token").Create(ctx, account, request)
	if err == nil {
		s.Data = map[string][]byte{corev1.ServiceAccountTokenKey: []byte(request.Status.Token)}
		err = admin.Update(ctx, s)
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// LastingToken returns a token of account that does not expire, as the controller of Kubernetes puts it into a Secret of type
// service-account-token. The server accepts it while Secret secret has it.
func (s *Server) LastingToken(t testing.TB, account *corev1.ServiceAccount, secret string) string {
	t.Helper()
	Require(t)
	text, err := s.loan.ServiceAccountKey()
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	const prefix = "kubernetes.io/serviceaccount/"
	claims, err := json.Marshal(map[string]string{
		"iss": "kubernetes/serviceaccount", "sub": "system:serviceaccount:" + account.Namespace + ":" + account.Name,
		prefix + "namespace": account.Namespace, prefix + "secret.name": secret,
		prefix + "service-account.name": account.Name, prefix + "service-account.uid": string(account.UID),
	})
	if err != nil {
		t.Fatal(err)
	}
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(`{"alg":"ES256"}`)) + "." + encode(claims)
	digest := sha256.Sum256([]byte(signed))
	r, v, err := ecdsa.Sign(rand.Reader, key.(*ecdsa.PrivateKey), digest[:])
	if err != nil {
		t.Fatal(err)
	}
	return signed + "." + encode(append(r.FillBytes(make([]byte, 32)), v.FillBytes(make([]byte, 32))...))
}
