// Package bystanders tests that one bad object costs only itself. Hostile tenants and a hostile member apply objects of
// tools/hostile beside ten Services whose endpoints change all the time, and the tests check those Services.
//
// The ClusterSet has real API servers for its broker and the members east, north and west, the real controller of each
// member, and an agent of each with the real dataplane. The broker has its quota controller. The member crook has no cluster:
// the test uses its credentials on the broker. All of it runs in one network namespace, in which every address is local, and a
// client connects all the time. Objects of a federation have a test of their own, in controlplane/federation/services.
//
// A failure names its objects and how to replay them:
//
//	ISTHMUS_HOSTILE_SEED=7           draw all objects from seed 7
//	ISTHMUS_HOSTILE_REPLAY=7/12,7/15 apply only the objects 12 and 15 of seed 7, together
package bystanders
