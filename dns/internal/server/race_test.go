//go:build race

package server

// withRaceDetector tells that memory is that of the race detector too, for which sync.Pool drops some of what it is given.
const withRaceDetector = true
