/* Measure MPI_Init, and messages between the first and the last rank. Rank 0 prints one JSON object, in microseconds. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SMALL_BYTES = 8, LARGE_BYTES = 4 << 20, REDUCED_DOUBLES = 1 << 17, WARM = 20, LOOPS = 2000, LARGE_LOOPS = 100 };

/* Return the microseconds of a message in one direction. */
static double pingpong(void *data, int bytes, int loops, int rank, int last)
{
	double begin = 0;

	for (int i = -WARM; i < loops; i++) {
		if (i == 0)
			begin = MPI_Wtime();
		if (rank == 0) {
			MPI_Send(data, bytes, MPI_CHAR, last, 0, MPI_COMM_WORLD);
			MPI_Recv(data, bytes, MPI_CHAR, last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else if (rank == last) {
			MPI_Recv(data, bytes, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(data, bytes, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
		}
	}
	return (MPI_Wtime() - begin) / loops / 2 * 1e6;
}

int main(int argc, char **argv)
{
	static double sent[REDUCED_DOUBLES], received[REDUCED_DOUBLES];
	static char data[LARGE_BYTES];
	struct timespec began, ended;
	double initialised, slowest, begin = 0;
	int rank, size;

	clock_gettime(CLOCK_MONOTONIC, &began);
	MPI_Init(&argc, &argv);
	clock_gettime(CLOCK_MONOTONIC, &ended);
	initialised = (double)(ended.tv_sec - began.tv_sec) * 1e6 + (double)(ended.tv_nsec - began.tv_nsec) / 1e3;
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	MPI_Reduce(&initialised, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
	if (rank == 0)
		printf("{\"MPI_Init\": %.1f", slowest);
	if (argc > 1 && strcmp(argv[1], "init") == 0) {
		if (rank == 0)
			printf("}\n");
		return MPI_Finalize();
	}
	memset(data, 1, sizeof(data));
	double latency = pingpong(data, SMALL_BYTES, LOOPS, rank, size - 1);
	double large = pingpong(data, LARGE_BYTES, LARGE_LOOPS, rank, size - 1);
	for (int i = -WARM; i < LARGE_LOOPS; i++) {
		if (i == 0)
			begin = MPI_Wtime();
		MPI_Allreduce(sent, received, REDUCED_DOUBLES, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	}
	if (rank == 0)
		printf(", \"latency, 8 B\": %.3f, \"4 MiB message\": %.1f, \"allreduce, 1 MiB\": %.1f}\n", latency, large,
		       (MPI_Wtime() - begin) / LARGE_LOOPS * 1e6);
	return MPI_Finalize();
}
