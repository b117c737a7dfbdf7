package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Rotated is a renewed token.
type Rotated struct {
	Supervisor clusterset.ClusterID `json:"supervisor"` // with the token
	Member     clusterset.ClusterID `json:"member"`     // that accepts it
	Revoked    int                  `json:"revoked"`    // deleted former tokens
}

// rotation replaces the tokens of one supervisor for one member.
type rotation struct {
	supervisor, member *Cluster
	former             string // the token before
	bound, token       string // the new token, and the Secret to which it is bound
}

// Rotate gives each given supervisor a new token for each given member. It stores the new tokens first. Old and new tokens
// are then both valid for overlap, while controllers read the new ones, and after that the old ones are deleted. After an
// earlier error the old tokens stay valid, and a repeated call completes the rotation.
//
// Rotation is final: a thief with an old token can request another one neither during the overlap nor after it.
func Rotate(ctx context.Context, namespace string, clusters []Cluster, overlap time.Duration) ([]Rotated, error) {
	s, err := newSurvey(ctx, namespace, clusters)
	if err != nil {
		return nil, err
	}
	if err := s.checkRotation(); err != nil {
		return nil, err
	}
	for _, found := range s.clusters {
		if err := s.permitRenewal(ctx, found.Cluster); err != nil {
			return nil, found.wrap(err)
		}
	}
	var rotations []rotation
	for _, supervisor := range s.clusters {
		if !supervisor.Supervisor {
			continue
		}
		for _, member := range s.clusters {
			r, err := s.begin(ctx, supervisor.Cluster, member.Cluster)
			if err != nil {
				return nil, err
			}
			rotations = append(rotations, r)
		}
	}
	if err := admin.Wait(ctx, overlap); err != nil {
		return nil, fmt.Errorf("old tokens are still valid, as are the new ones; rotate again: %w", err)
	}
	return s.finish(ctx, rotations)
}

// checkRotation returns an error unless the given clusters are members, and those given as supervisors are supervisors.
func (s *survey) checkRotation() error {
	given := false
	for _, found := range s.clusters {
		if found.Supervisor && !s.supervisors[found.ID] {
			return found.wrap(errors.New("it is not a supervisor of the given clusters; isthmusctl federation create or add makes it one"))
		}
		if _, ok := s.members[found.ID]; !ok {
			return found.wrap(errors.New("no given supervisor has it as a member; isthmusctl federation add makes it one"))
		}
		given = given || found.Supervisor
	}
	if !given {
		return errors.New("no supervisor is given, and only supervisors have tokens; give --supervisor ID=CONTEXT")
	}
	return nil
}

// permitRenewal writes the policies and rights that a renewal needs, for clusters of a federation that an earlier version formed.
func (s *survey) permitRenewal(ctx context.Context, c *Cluster) error {
	wanted := slices.Concat(admission.Tokens(s.namespace), admission.Fence(s.namespace, c.ID), admission.Own(s.namespace))
	if c.Supervisor {
		wanted = append(wanted, secretRights(s.namespace, s.secretNames()...)...)
	}
	for _, obj := range wanted {
		if err := apply(ctx, c.Client, obj); err != nil {
			return err
		}
	}
	return admin.InstallFences(ctx, c.Client, s.namespace)
}

// begin gives a supervisor a new token for a member, and takes away its right to request others until finish. Otherwise a thief with
// the former token could request one that is bound to the new Secret, and stay.
func (s *survey) begin(ctx context.Context, supervisor, member *Cluster) (rotation, error) {
	r := rotation{supervisor: supervisor, member: member, bound: newCredential(supervisor.ID)}
	have, err := stored(ctx, supervisor, member)
	if err != nil {
		return r, supervisor.wrap(err)
	}
	r.former = string(have[federationv1alpha1.SecretToken])
	if err := s.grant(ctx, member, supervisor.ID, ""); err != nil {
		return r, member.wrap(err)
	}
	if err := s.createCredential(ctx, member, supervisor.ID, r.bound); err != nil {
		return r, member.wrap(err)
	}
	if r.token, err = s.requestToken(ctx, member, supervisor.ID, r.bound); err != nil {
		return r, member.wrap(err)
	}
	return r, supervisor.wrap(s.storeToken(ctx, supervisor, member, r.bound, r.token))
}

// finish ends the former tokens. It lets the supervisors renew the new ones when the members accept no former one.
func (s *survey) finish(ctx context.Context, rotations []rotation) ([]Rotated, error) {
	var rotated []Rotated
	all := 0
	for _, r := range rotations {
		// The controller may have written a renewal of the former token meanwhile.
		if err := s.storeToken(ctx, r.supervisor, r.member, r.bound, r.token); err != nil {
			return rotated, r.supervisor.wrap(err)
		}
		revoked, err := s.revokeTokens(ctx, r.member, r.supervisor.ID, r.bound)
		if err != nil {
			return rotated, r.member.wrap(err)
		}
		if err := forgetFormer(ctx, r.supervisor, r.member); err != nil {
			return rotated, r.supervisor.wrap(err)
		}
		rotated = append(rotated, Rotated{Supervisor: r.supervisor.ID, Member: r.member.ID, Revoked: revoked})
		all += revoked
	}
	if all > 0 {
		if err := admin.AwaitCaches(ctx); err != nil {
			return rotated, fmt.Errorf("the old tokens have ended, and the new ones cannot be renewed yet; rotate again: %w", err)
		}
	}
	for _, r := range rotations {
		if r.former != "" {
			if err := admin.Refused(ctx, r.member.Client, itsServer, r.former); err != nil {
				return rotated, r.member.wrap(err)
			}
		}
		if err := s.grant(ctx, r.member, r.supervisor.ID, r.bound); err != nil {
			return rotated, r.member.wrap(err)
		}
	}
	return rotated, nil
}
