//go:build !race

package server

const withRaceDetector = false
