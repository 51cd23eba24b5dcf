package anabranch;

/** A refusal of a controller, or of this client, by a name of section 11. */
public final class Failure extends RuntimeException {
    public final String name;

    public Failure(String name, String message) {
        super(message);
        this.name = name;
    }

    /** These refusals hold for all copies of a command. */
    boolean isFinal() {
        return name.equals("TransactionAborted") || name.equals("AlreadyCommitted") || name.equals("EventTooLarge");
    }
}
