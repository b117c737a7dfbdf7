package member

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// ErrAnotherCluster is of an API server that is not the member's.
var ErrAnotherCluster = errors.New("it is another cluster")

// identity is what a cluster says of itself.
type identity struct {
	uid        string // of its namespace kube-system
	id         string // "" if it claims none
	supervisor bool
}

// statusError is an answer other than 200.
type statusError struct {
	code int
	path string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("GET %s: %d %s", e.path, e.code, http.StatusText(e.code))
}

// identify asks the cluster behind send who it is.
func identify(ctx context.Context, send func(*http.Request) (*http.Response, error)) (identity, error) {
	var who identity
	var namespace metav1.PartialObjectMetadata
	if err := get(ctx, send, "/api/v1/namespaces/"+metav1.NamespaceSystem, &namespace); err != nil {
		return who, err
	}
	who.uid = string(namespace.UID)
	var claims federationv1alpha1.ClusterClaimList
	err := get(ctx, send, "/apis/"+federationv1alpha1.GroupVersion.String()+"/clusterclaims", &claims)
	var status *statusError
	if errors.As(err, &status) && status.code == http.StatusNotFound {
		return who, nil // no such kind yet, so no claim
	}
	if err != nil {
		return who, err
	}
	for _, claim := range claims.Items {
		switch claim.Spec.Name {
		case federationv1alpha1.ClaimID:
			who.id = claim.Spec.Value
		case federationv1alpha1.ClaimSupervisor:
			who.supervisor = claim.Spec.Value == "true"
		}
	}
	return who, nil
}

// get decodes the answer at path, in JSON, to into.
func get(ctx context.Context, send func(*http.Request) (*http.Response, error), path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://member"+path, http.NoBody)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	resp, err := send(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return &statusError{resp.StatusCode, path}
	}
	content, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	return json.Unmarshal(content, into)
}

// explain returns what err means for the member and what to do about it, in words that do not change from one try to
// the next.
func explain(err error, m federationv1alpha1.MemberCluster, namespace string) string {
	var status *statusError
	switch {
	case errors.Is(err, ErrAnotherCluster):
		return err.Error()
	case errors.Is(err, errNoTarget):
		return fmt.Sprintf("Secret %s/%s does not exist, or its %s or %s cannot be used; run isthmusctl federation rotate",
			namespace, m.Secret, federationv1alpha1.SecretToken, federationv1alpha1.SecretCA)
	case errors.As(err, &status) && status.code == http.StatusUnauthorized:
		return fmt.Sprintf("%s does not know the token in Secret %s/%s, which may have expired; run isthmusctl federation rotate", m.Server, namespace, m.Secret)
	case errors.As(err, &status) && status.code == http.StatusForbidden:
		return fmt.Sprintf("%s denies the account of Secret %s/%s to read %s; run isthmusctl federation add again", m.Server, namespace, m.Secret, status.path)
	default:
		return fmt.Sprintf("%s does not answer; check spec.members[clusterID=%s].server of the Federation, and the network", m.Server, m.ClusterID)
	}
}
